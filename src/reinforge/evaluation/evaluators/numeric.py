"""1.0 where the last number of the output is the expected one, else 0.0."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import as_score, missing, text_of
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+−])?"  # a sign, unless it joins two things: "10-5", "item-7"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?<=\d)(?:[eE][-+]?\d+\b)?"
)


class NumericConfig(EvaluatorConfig, name="numeric"):
    """How far two numbers may differ: by `max(abs_tolerance, rel_tolerance * larger)`."""

    abs_tolerance: float = Field(default=1e-6, ge=0, description="Largest difference that still counts as equal.")
    rel_tolerance: float = Field(default=0.0, ge=0, description="The same, as a share of the larger number.")


class Numeric(Evaluator):
    """Compares the last number of the output with the expected one.

    An output without a number gets 0.0: the agent ran and gave no answer. An expected output without one is missing.
    """

    def __init__(self, config: NumericConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0 or 0.0."""
        expected = last_number(item.expected_output_obj)
        if expected is None:
            return missing(item, f"the expected output {text_of(item.expected_output_obj)[:80]!r} holds no number")
        found = last_number(item.output_obj)
        if found is None:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=f"no number in the output; expected {expected:g}")
        tolerance = {"abs_tol": self.config.abs_tolerance, "rel_tol": self.config.rel_tolerance}
        same = math.isclose(found, expected, **tolerance)
        return EvalOutputItem(id=item.id, score=float(same), reasoning=f"found {found:g}, expected {expected:g}")


def last_number(value: Any) -> float | None:
    """Returns a number, or the last one in a text; None where there is none.

    Examples: `"so 3 + 4 = 7."` -> 7.0, `"$1,234.50"` -> 1234.5, `"between 10-5"` -> 5.0, `"x = -2e3"` -> -2000.0.
    """
    if isinstance(value, bool):
        return None
    number = as_score(value)
    if number is not None:
        return number
    found = [match[0] for match in NUMBER.finditer(text_of(value)) if match[0]]
    return as_score(float(found[-1].replace(",", "").replace("−", "-"))) if found else None


@register_evaluator(config_type=NumericConfig)
async def numeric(config: NumericConfig, builder: Any) -> AsyncIterator[Numeric]:
    """Yields the evaluator."""
    yield Numeric(config)
