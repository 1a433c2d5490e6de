"""Talk to a training backend."""
