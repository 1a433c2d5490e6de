"""Scorers made of scorers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.errors import ConfigError
from reinforge.redteam.core.scorer import Scorer


class WeightedScorer(Scorer[Any, Any]):
    """The sum of weight times score; a negative weight punishes.

    Example: `WeightedScorer({KeywordScorer("quibbern"): 1.0, RegexScorer("please"): -0.5})` scores "quibbern please"
    0.5.

    Args:
        parts: Weight by scorer.

    Raises:
        ConfigError: There is no part, or a weight is 0 or not finite.
    """

    def __init__(self, parts: Mapping[Scorer[Any, Any], float]):
        if not parts:
            raise ConfigError("WeightedScorer: no part")
        for scorer, weight in parts.items():
            if not math.isfinite(weight) or weight == 0:
                raise ConfigError(f"WeightedScorer: the weight of {type(scorer).__name__} is {weight:g}; leave it out")
        self.parts = dict(parts)

    def score(self, x: Sequence[Any]) -> list[float]:
        """Returns the sums."""
        columns = [[weight * score for score in scorer.score(x)] for scorer, weight in self.parts.items()]
        return [math.fsum(row) for row in zip(*columns, strict=True)]


class CachedScorer(Scorer[Any, Any]):
    """Asks another scorer about each text once, in batches.

    Example: `CachedScorer(ClassifierScorer("folder"), batch_size=16)`.

    Args:
        scorer: The scorer.
        max_texts: Scores that are remembered; the oldest ones are forgotten.
        batch_size: Texts that it is asked about at the same time; None: all.
    """

    def __init__(self, scorer: Scorer[Any, Any], *, max_texts: int = 10_000, batch_size: int | None = None):
        self.scorer, self.max_texts, self.batch_size = scorer, max_texts, batch_size
        self._known: OrderedDict[Any, float] = OrderedDict()

    def score(self, x: Sequence[Any]) -> list[float]:
        """Returns the scores; only texts that are not remembered are asked about."""
        keys = [_key(text) for text in x]
        asked = {key: text for key, text in zip(keys, x, strict=True) if key not in self._known}
        found = {key: self._known[key] for key in keys if key in self._known}
        texts, size = list(asked.values()), self.batch_size or max(1, len(asked))
        scores = [s for start in range(0, len(texts), size) for s in self.scorer.score(texts[start : start + size])]
        found.update(zip(asked, map(float, scores), strict=True))
        for key in keys:
            self._known[key] = found[key]
            self._known.move_to_end(key)
        while len(self._known) > self.max_texts:
            self._known.popitem(last=False)
        return [found[key] for key in keys]


def _key(text: Any) -> Any:
    """Returns what texts that score the same have in common: a response may bring calls of tools beside its text."""
    message = getattr(text, "message", None)
    return (text, repr(message)) if message else text
