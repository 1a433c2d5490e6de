"""The HTML report of a run: one file with curves, verdict, episodes and settings, without scripts or requests."""
