"""Trackers, listed in `registry.py`: dashboards that show the metrics of a run; the run folder stays the record."""
