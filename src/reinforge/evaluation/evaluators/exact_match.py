"""1.0 where the output is the expected one, else 0.0."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing, text_of
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class ExactMatchConfig(EvaluatorConfig, name="exact_match"):
    """How two texts are compared."""

    strip: bool = Field(default=True, description="White space at both ends does not count.")
    ignore_case: bool = Field(default=False, description="Capitals do not count.")
    collapse_space: bool = Field(default=False, description="Any white space between words counts as one space.")
    any_of: bool = Field(default=False, description="The expected output is a list of right answers; one is enough.")


class ExactMatch(Evaluator):
    """Compares as text; outputs that are not text compare as values first, so `[1, 2]` equals `[1, 2]`.

    Where an object or a list is expected and the output is text, the JSON that the text holds is compared.

    An agent that returned nothing gets 0.0: it ran and gave no answer. An example without expected output is missing.
    """

    def __init__(self, config: ExactMatchConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0 or 0.0."""
        if item.expected_output_obj is None:
            return missing(item, "the example has no expected output")
        expected = item.expected_output_obj
        if self.config.any_of and not isinstance(expected, list):
            return missing(item, f"any_of: the expected output is {type(expected).__name__}, not a list")
        answers = expected if self.config.any_of else [expected]
        same = item.output_obj is not None and any(self._equal(item.output_obj, answer) for answer in answers)
        reason = f"output {self._text(item.output_obj)[:200]!r}, expected {self._text(expected)[:200]!r}"
        return EvalOutputItem(id=item.id, score=float(same), reasoning=reason)

    def _equal(self, output: Any, expected: Any) -> bool:
        if output == expected or self._text(output) == self._text(expected):
            return True
        if not isinstance(output, str) or not isinstance(expected, dict | list):
            return False
        try:
            return bool(json.loads(output) == expected)
        except (ValueError, RecursionError):
            return False

    def _text(self, value: Any) -> str:
        text = text_of(value)
        text = " ".join(text.split()) if self.config.collapse_space else text
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text


@register_evaluator(config_type=ExactMatchConfig)
async def exact_match(config: ExactMatchConfig, builder: Any) -> AsyncIterator[ExactMatch]:
    """Yields the evaluator."""
    yield ExactMatch(config)
