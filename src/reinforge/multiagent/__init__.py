"""Several agents in one conversation, some of which share a model."""
