"""The built-in protocols, one per file, listed in `registry.py`."""
