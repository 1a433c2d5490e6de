"""Several evaluators weighted into one score, the parts kept.

weights: {correct: 0.8, short: 0.2};  correct 1.0, short 0.5   =>  0.9
                                      correct 1.0, short missing  =>  missing: half a reward is no reward
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.evaluators.base import missing, score_item
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class WeightedConfig(EvaluatorConfig, name="weighted"):
    """The sum of weight times score; weights are not normalised, and a negative one punishes."""

    weights: dict[str, float] = Field(min_length=1, description="Entries of eval.evaluators -> weight.")

    @field_validator("weights")
    @classmethod
    def _count(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(f"the weight of {name} is {weight:g}; leave the part out, or give it a finite weight")
        return weights


class Weighted(Evaluator):
    """Adds up the scores of its parts.

    Args:
        parts: Evaluators by name.
        weights: Weights by name.
    """

    def __init__(self, parts: Mapping[str, Evaluator], weights: Mapping[str, float]):
        self.parts, self.weights = dict(parts), dict(weights)

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Scores every part and returns the sum; a run scores the parts itself, once, and calls `combine`."""
        return self.combine(item, {name: await score_item(part, item) for name, part in self.parts.items()})

    def combine(self, item: EvalInputItem, scores: Mapping[str, EvalOutputItem]) -> EvalOutputItem:
        """Returns the weighted sum of scores that are known already; missing where one of them is.

        Args:
            item: The example.
            scores: Score by part.
        """
        told = {
            name: {"score": scores[name].score, "weight": weight, "reasoning": scores[name].reasoning}
            for name, weight in self.weights.items()
        }
        lacking = [f"{name}: {scores[name].error}" for name in self.weights if scores[name].error is not None]
        if lacking:
            return missing(item, f"a part is missing: {'; '.join(lacking)}", told)
        total = math.fsum(weight * float(scores[name].score) for name, weight in self.weights.items())
        return EvalOutputItem(id=item.id, score=total, reasoning=told)


def _refuse_bad_names(config: WeightedConfig, entries: Mapping[str, Any]) -> None:
    """Raises for parts that are no entries, and for a part that contains the whole."""
    for name in config.weights:
        if name not in entries:
            hint = did_you_mean(name, entries)
            message = f'eval.evaluators has no entry "{name}"{hint or ";"} it has {", ".join(entries)}'
            raise ConfigError(Problem(f"weights.{name}", message))
    own = [name for name, entry in entries.items() if entry is config]

    def reach(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            circle = " -> ".join([*way[way.index(name) :], name])
            raise ConfigError(Problem("weights", f"{circle} goes in a circle", "weight each part only below the whole"))
        for part in getattr(entries.get(name), "weights", None) or {}:
            reach(part, (*way, name))

    for name in own:
        reach(name, ())


@register_evaluator(config_type=WeightedConfig)
async def weighted(config: WeightedConfig, builder: Any) -> AsyncIterator[Weighted]:
    """Yields the sum of entries of `eval.evaluators`."""
    _refuse_bad_names(config, builder.config.eval.evaluators)
    yield Weighted({name: await builder.get_evaluator(name) for name in config.weights}, config.weights)
