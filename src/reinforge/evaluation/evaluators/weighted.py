"""Scores by a weighted sum of other evaluators.

weights: {correct: 0.8, short: 0.2};  correct 1.0, short 0.5      =>  0.9
                                      correct 1.0, short missing  =>  missing, since part of a reward is not a reward
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import Field, field_validator

from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.evaluators.base import describe_refusal, missing_score, score_item, to_score
from reinforge.interfaces import Builder, Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class WeightedConfig(EvaluatorConfig, name="weighted"):
    """The weighted sum of other evaluators' scores; weights are not normalized, and a negative one is a penalty."""

    weights: dict[str, float] = Field(min_length=1, description="Name of an entry of eval.evaluators -> weight.")

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        for name, weight in weights.items():
            if not math.isfinite(weight) or weight == 0:
                raise ValueError(
                    f"the weight of {name} is {weight:g}; give it a finite weight other than 0, or remove it"
                )
        return weights


class Weighted(Evaluator):
    """Adds up the weighted scores of its parts."""

    def __init__(self, parts: Mapping[str, Evaluator], weights: Mapping[str, float]):
        self.parts, self.weights = dict(parts), dict(weights)
        self.is_function = all(getattr(part, "is_function", False) for part in self.parts.values())

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Scores every part and returns the weighted sum; a run scores each part once itself and calls `combine`."""
        return self.combine(item, {name: await score_item(part, item) for name, part in self.parts.items()})

    def combine(self, item: EvalInputItem, scores: Mapping[str, EvalOutputItem]) -> EvalOutputItem:
        """Returns the weighted sum of the given scores; missing if one of them is, or if the sum is too large."""
        reasoning = {
            name: {"score": scores[name].score, "weight": weight, "reasoning": scores[name].reasoning}
            for name, weight in self.weights.items()
        }
        errors = [f"{name}: {scores[name].error}" for name in self.weights if scores[name].error is not None]
        if errors:
            return missing_score(item, f"no score for {'; '.join(errors)}", reasoning)
        terms = [weight * float(scores[name].score) for name, weight in self.weights.items()]
        total = math.fsum(terms) if all(to_score(term) is not None for term in terms) else sum(terms)
        if to_score(total) is None:
            return missing_score(item, f"the weighted sum is {describe_refusal(total)}", reasoning)
        return EvalOutputItem(id=item.id, score=total, reasoning=reasoning)


def _check_parts(config: WeightedConfig, entries: Mapping[str, Any]) -> None:
    """Raises a `ConfigError` for parts that do not exist and for circular references."""
    for name in config.weights:
        if name not in entries:
            hint = did_you_mean(name, entries)
            message = f'eval.evaluators has no entry "{name}"{hint or ";"} it has {", ".join(entries)}'
            raise ConfigError(Problem(f"weights.{name}", message))
    own = [name for name, entry in entries.items() if entry is config]

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycle = " -> ".join([*path[path.index(name) :], name])
            fix = "remove one of these parts from the weights that name it"
            raise ConfigError(Problem("weights", f"circular reference: {cycle}", fix))
        for part in getattr(entries.get(name), "weights", None) or {}:
            visit(part, (*path, name))

    for name in own:
        visit(name, ())


@register_evaluator(config_type=WeightedConfig)
async def weighted(config: WeightedConfig, builder: Builder) -> AsyncIterator[Weighted]:
    _check_parts(config, builder.config.eval.evaluators)
    yield Weighted({name: await builder.get_evaluator(name) for name in config.weights}, config.weights)
