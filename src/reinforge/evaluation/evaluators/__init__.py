"""Evaluators: each scores an agent's answer. Importing this package registers them."""

from reinforge.evaluation.evaluators import (
    contains,
    exact_match,
    json_schema,
    llm_judge,
    numeric,
    pairwise_judge,
    python,
    regex,
    relative_judge,
    weighted,
)

__all__ = [
    "contains",
    "exact_match",
    "json_schema",
    "llm_judge",
    "numeric",
    "pairwise_judge",
    "python",
    "regex",
    "relative_judge",
    "weighted",
]
