"""1.0 where the output contains certain texts, else 0.0."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field, field_validator

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing, text_of
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class ContainsConfig(EvaluatorConfig, name="contains"):
    """Which texts the output must contain."""

    texts: list[str] | None = Field(
        default=None, description="The texts, or one of them; null: the expected output (a text or a list of texts)."
    )
    mode: Literal["all", "any"] = Field(default="all", description="Whether each of the texts is needed, or one.")
    ignore_case: bool = Field(default=False, description="Capitals do not count.")

    @field_validator("texts", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("texts")
    @classmethod
    def _say_something(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (not value or not all(value)):
            raise ValueError("an empty text is in every output; give at least one text, none of them empty")
        return value


class Contains(Evaluator):
    """Looks for texts in the output; an example without any to look for is missing."""

    def __init__(self, config: ContainsConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns 1.0 or 0.0, and which texts are not there."""
        texts = self.config.texts
        if texts is None:
            expected = item.expected_output_obj
            texts = [text_of(each) for each in (expected if isinstance(expected, list) else [expected])]
            if not texts or not all(texts):
                return missing(item, "the example has no expected output to look for")
        output = self._folded(text_of(item.output_obj))
        absent = [text for text in texts if self._folded(text) not in output]
        found = not absent if self.config.mode == "all" else len(absent) < len(texts)
        reason = f"not there: {', '.join(repr(text[:80]) for text in absent)}" if absent else "all texts are there"
        return EvalOutputItem(id=item.id, score=float(found), reasoning=reason)

    def _folded(self, text: str) -> str:
        return text.casefold() if self.config.ignore_case else text


@register_evaluator(config_type=ContainsConfig)
async def contains(config: ContainsConfig, builder: Any) -> AsyncIterator[Contains]:
    """Yields the evaluator."""
    yield Contains(config)
