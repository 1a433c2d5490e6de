"""The journal of a run: SQLite, written by one process, checked and repaired by any."""
