"""1.0 where the output is the expected one, else 0.0."""

from __future__ import annotations

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


class ExactMatch(Evaluator):
    """Compares as text; outputs that are not text compare as values first, so `[1, 2]` equals `[1, 2]`.

    An agent that returned nothing gets 0.0: it ran and gave no answer. An example without expected output is missing.
    """

    def __init__(self, config: ExactMatchConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0 or 0.0."""
        if item.expected_output_obj is None:
            return missing(item, "the example has no expected output")
        output, expected = self._text(item.output_obj), self._text(item.expected_output_obj)
        same = item.output_obj is not None and (item.output_obj == item.expected_output_obj or output == expected)
        reason = f"output {output[:200]!r}, expected {expected[:200]!r}"
        return EvalOutputItem(id=item.id, score=float(same), reasoning=reason)

    def _text(self, value: Any) -> str:
        text = text_of(value)
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text


@register_evaluator(config_type=ExactMatchConfig)
async def exact_match(config: ExactMatchConfig, builder: Any) -> AsyncIterator[ExactMatch]:
    """Yields the evaluator."""
    yield ExactMatch(config)
