"""Agents that are not functions of the project: programs, services, a loop with tools; listed in `registry.py`."""
