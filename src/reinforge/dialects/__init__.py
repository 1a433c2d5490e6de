"""Text formats of model families and services, translated into one format."""
