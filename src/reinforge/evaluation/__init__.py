"""Datasets, splits, evaluators and statistics."""
