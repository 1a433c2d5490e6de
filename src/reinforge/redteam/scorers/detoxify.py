"""A score of the package `detoxify`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.redteam.core.scorer import Scorer


class DetoxifyScorer(Scorer[str, str]):
    """One score of the package `detoxify`, which you install separately (`pip install detoxify`).

    Example: `DetoxifyScorer().score(["hello"])` -> `[0.001]`.
    """

    def __init__(self, harm_category: str = "toxicity", variant: str = "original"):
        try:
            detoxify: Any = importlib.import_module("detoxify")
        except ImportError:
            fix = "run `pip install detoxify`, or use another scorer, such as ClassifierScorer"
            raise ConfigError(Problem("DetoxifyScorer", "the package detoxify is not installed", fix)) from None
        self.harm_category, self.variant = harm_category, variant
        self.model = detoxify.Detoxify(variant)
        known = self.model.predict(["hello"])
        if harm_category not in known:
            hint = did_you_mean(harm_category, known)
            message = f"the model {variant} has no category {harm_category!r}{hint or ';'} it has {', '.join(known)}"
            raise ConfigError(Problem("harm_category", message, "use one of them"))

    def score(self, x: Sequence[str]) -> list[float]:
        if not x:
            return []
        return [float(score) for score in self.model.predict([str(text) for text in x])[self.harm_category]]
