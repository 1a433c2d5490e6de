"""Evaluators: each looks at an answer and returns a score. Importing this registers them."""

from reinforge.evaluation.evaluators import exact_match, numeric, python

__all__ = ["exact_match", "numeric", "python"]
