"""Evaluators, listed in `registry.py`: each scores the answers of an agent; imported when they are named."""
