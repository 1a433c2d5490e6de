"""Trackers: dashboards that show the metrics of a run; the run folder stays the record."""
