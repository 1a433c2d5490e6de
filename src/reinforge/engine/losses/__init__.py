"""Losses by name, in the modules that `FAMILIES` in `base.py` lists."""
