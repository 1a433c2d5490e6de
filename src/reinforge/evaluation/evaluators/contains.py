"""Scores 1.0 if the output contains the given texts, else 0.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score, run_beside, to_text
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class ContainsConfig(EvaluatorConfig, name="contains"):
    """Scores 1.0 if the output contains the given texts, else 0.0."""

    texts: list[str] | None = Field(
        default=None, description="A string or a list of strings; null: the example's expected output."
    )
    mode: Literal["all", "any"] = Field(
        default="all", description="Whether all of the strings are required, or any one."
    )
    ignore_case: bool = Field(default=False, description="Ignore upper and lower case.")

    @field_validator("texts", mode="before")
    @classmethod
    def _wrap_single_text(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("texts")
    @classmethod
    def _check_not_empty(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (not value or not all(value)):
            raise ValueError("every output contains an empty string; give at least one string, none of them empty")
        return value


@register_evaluator(config_type=ContainsConfig)
class Contains(Evaluator):
    """Searches the output for texts; an example without a text to search for gets no score."""

    reads_steps = False

    def __init__(self, config: ContainsConfig):
        self.config, self.needs_answer = config, config.texts is None

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        texts = self.config.texts
        if texts is None:
            expected = item.expected_output_obj
            texts = [to_text(each) for each in (expected if isinstance(expected, list) else [expected])]
            if not texts or not all(texts):
                return missing_score(item, "the example has no expected output to search for")
        output = to_text(item.output_obj)
        absent = await run_beside(lambda: self._find_absent(texts, output), len(output))
        found = not absent if self.config.mode == "all" else len(absent) < len(texts)
        reason = f"not found: {', '.join(repr(text[:80]) for text in absent)}" if absent else "found all strings"
        return EvalOutputItem(id=item.id, score=float(found), reasoning=reason)

    def _find_absent(self, texts: Sequence[str], output: str) -> list[str]:
        output = self._normalize(output)
        return [text for text in texts if self._normalize(text) not in output]

    def _normalize(self, text: str) -> str:
        return text.casefold() if self.config.ignore_case else text
