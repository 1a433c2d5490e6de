"""What a run would take on a cluster that is not there yet."""
