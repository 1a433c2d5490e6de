"""Training: the epoch loop, validation, resuming and the verdict."""
