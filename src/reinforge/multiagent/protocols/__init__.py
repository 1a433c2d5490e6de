"""The built-in protocols, one per file."""
