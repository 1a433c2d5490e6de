"""The page of a run: one HTML file with curves, verdict, episodes and settings, without scripts or requests."""
