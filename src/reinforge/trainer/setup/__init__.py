"""Builds and validates the components of a run before any work starts."""
