"""Scores 1.0 if the last number in the output equals the expected number, else 0.0."""

from __future__ import annotations

import math
import re
from typing import Any

import regex
from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score, run_beside, to_number, to_text
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+−])?"  # a sign, but not a hyphen as in "10-5" or "item-7"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?<=\d)(?:[eE][-+]?\d+\b)?"
)
LAST_DIGIT = regex.compile(r"(?r)\p{Nd}", regex.VERSION0)
MAX_DIGITS = 10_000
"""Characters of a number that are read; each digit belongs to some number, so the last number has the last digit."""


class NumericConfig(EvaluatorConfig, name="numeric"):
    """Scores 1.0 if the last number in the output equals the expected number, else 0.0.

    The numbers may differ by `max(abs_tolerance, rel_tolerance * larger)`.
    """

    abs_tolerance: float = Field(default=1e-6, ge=0, description="Largest difference that counts as equal.")
    rel_tolerance: float = Field(
        default=0.0, ge=0, description="Largest difference that counts as equal, as a fraction of the larger number."
    )


@register_evaluator(config_type=NumericConfig)
class Numeric(Evaluator):
    """Compares the last number in the output with the last number in the expected output.

    An output without a number gets 0.0: the agent ran and gave no answer. Without a
    number in the expected output there is no score.
    """

    reads_steps, needs_answer = False, True

    def __init__(self, config: NumericConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        expected = find_last_number(item.expected_output_obj)
        if expected is None:
            return missing_score(item, f"the expected output {to_text(item.expected_output_obj)[:80]!r} has no number")
        output = item.output_obj if to_number(item.output_obj) is not None else to_text(item.output_obj)
        size = len(output) if isinstance(output, str) else 0
        found = await run_beside(lambda: find_last_number(output), size)
        if found is None:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=f"no number in the output; expected {expected:g}")
        tolerance = {"abs_tol": self.config.abs_tolerance, "rel_tol": self.config.rel_tolerance}
        same = math.isclose(found, expected, **tolerance)
        return EvalOutputItem(id=item.id, score=float(same), reasoning=f"found {found:g}, expected {expected:g}")


def find_last_number(value: Any) -> float | None:
    """Returns a number, or the last number in a string; None if there is none.

    Examples: `"so 3 + 4 = 7."` -> 7.0, `"$1,234.50"` -> 1234.5, `"between 10-5"` -> 5.0, `"x = -2e3"` -> -2000.0.
    """
    if isinstance(value, bool):
        return None
    number = to_number(value)
    if number is not None:
        return number
    text = to_text(value)
    last_digit = LAST_DIGIT.search(text)
    if last_digit is None:
        return None
    end = last_digit.end()
    found = [match[0] for match in NUMBER.finditer(text[max(0, end - MAX_DIGITS) : end + 1]) if match[0]]
    return to_number(float(found[-1].replace(",", "").replace("−", "-"))) if found else None
