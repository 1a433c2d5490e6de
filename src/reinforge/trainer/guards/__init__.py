"""Guards: what is watched while a run trains, each with a limit beyond which it warns and then stops the run."""
