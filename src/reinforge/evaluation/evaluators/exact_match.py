"""Scores 1.0 if the output equals the expected output, else 0.0."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from reinforge.bounded import load_json
from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score, run_beside, to_text
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class ExactMatchConfig(EvaluatorConfig, name="exact_match"):
    """Scores 1.0 if the output equals the expected output, else 0.0."""

    strip: bool = Field(default=True, description="Ignore white space at both ends.")
    ignore_case: bool = Field(default=False, description="Ignore upper and lower case.")
    collapse_space: bool = Field(default=False, description="Treat any run of white space as one space.")
    any_of: bool = Field(
        default=False, description="The expected output is a list of correct answers; matching one is enough."
    )


@register_evaluator(config_type=ExactMatchConfig)
class ExactMatch(Evaluator):
    """Compares values first, so that `[1, 2]` equals `[1, 2]`, and then their text.

    If an object or a list is expected and the output is a string, the string is also parsed as JSON.

    An agent that returns None gets 0.0: it ran and gave no answer. An example without an expected output gets no score.
    """

    reads_steps, needs_answer = False, True

    def __init__(self, config: ExactMatchConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        if item.expected_output_obj is None:
            return missing_score(item, "the example has no expected output")
        expected = item.expected_output_obj
        if self.config.any_of and not isinstance(expected, list):
            kind = type(expected).__name__
            return missing_score(item, f"any_of needs a list as the expected output, but the example has {kind}")
        answers = expected if self.config.any_of else [expected]
        output, text = item.output_obj, to_text(item.output_obj)

        def compare() -> tuple[bool, str]:
            same = output is not None and any(self._equal(output, answer) for answer in answers)
            return same, f"output {self._normalize(text)[:200]!r}, expected {self._text(expected)[:200]!r}"

        same, reason = await run_beside(compare, len(text))
        return EvalOutputItem(id=item.id, score=float(same), reasoning=reason)

    def _equal(self, output: Any, expected: Any) -> bool:
        if output == expected or self._text(output) == self._text(expected):
            return True
        if not isinstance(output, str) or not isinstance(expected, dict | list):
            return False
        try:
            return bool(load_json(output) == expected)
        except ValueError:
            return False

    def _text(self, value: Any) -> str:
        return self._normalize(to_text(value))

    def _normalize(self, text: str) -> str:
        text = " ".join(text.split()) if self.config.collapse_space else text
        text = text.strip() if self.config.strip else text
        return text.casefold() if self.config.ignore_case else text
