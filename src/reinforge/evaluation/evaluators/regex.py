"""Scores 1.0 if a regular expression matches the output, else 0.0."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import run_beside, to_text
from reinforge.evaluation.patterns import compile_pattern, search_pattern
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class RegexConfig(EvaluatorConfig, name="regex"):
    """Scores 1.0 if a regular expression matches the output, else 0.0."""

    pattern: str = Field(min_length=1, description="In Python's syntax; flags go in front: (?i) (?m) (?s).")
    mode: Literal["search", "fullmatch"] = Field(
        default="search", description="search: match anywhere in the output; fullmatch: match all of it."
    )
    max_chars: int = Field(
        default=20_000, ge=1, description="Longer outputs score 0.0, since matching them could take forever."
    )
    timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Time limit of matching one output, in seconds; if it is exceeded, the score is missing, since the "
        "pattern is at fault.",
    )

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern


@register_evaluator(config_type=RegexConfig)
class Regex(Evaluator):
    """Matches the output as text; None counts as the empty string."""

    reads_steps = False

    def __init__(self, config: RegexConfig):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        output = to_text(item.output_obj)
        if len(output) > self.config.max_chars:
            reason = f"the output has {len(output)} characters, more than max_chars ({self.config.max_chars})"
            return EvalOutputItem(id=item.id, score=0.0, reasoning=reason)
        config = self.config

        def search() -> Any:
            return search_pattern(config.pattern, output, config.timeout_s, whole=config.mode == "fullmatch")

        match = await run_beside(search)
        reason = f"matched {match[0][:200]!r}" if match else "no match"
        return EvalOutputItem(id=item.id, score=float(match is not None), reasoning=reason)
