"""Datasets, splits, evaluators and statistics; `registry.py` lists the datasets and evaluators."""
