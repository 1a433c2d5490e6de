"""Only versions before 0.2 have it."""
