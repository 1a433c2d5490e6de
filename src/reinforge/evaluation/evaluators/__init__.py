"""Evaluators: each scores an agent's answer. Importing this package registers them."""

from reinforge.evaluation.evaluators import (
    contains,
    exact_match,
    json_schema,
    llm_judge,
    numeric,
    python,
    regex,
    weighted,
)

__all__ = ["contains", "exact_match", "json_schema", "llm_judge", "numeric", "python", "regex", "weighted"]
