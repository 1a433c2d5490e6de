"""The run folder: journal, checkpoints, reports, and the readers of all three."""
