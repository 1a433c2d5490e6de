"""Evaluators: each looks at an answer and returns a score. Importing this registers them."""

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
