"""Workers and agents on a Ray cluster."""
