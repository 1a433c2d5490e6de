"""Scorers that wrap other scorers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.errors import ConfigError
from reinforge.redteam.core.scorer import Scorer


class WeightedScorer(Scorer[Any, Any]):
    """The weighted sum of scores; a negative weight is a penalty.

    Example: `WeightedScorer({KeywordScorer("quibbern"): 1.0, RegexScorer("please"): -0.5})` scores "quibbern please"
    0.5.

    Args:
        parts: The scorers and their weights.

    Raises:
        ConfigError: There are no scorers, or a weight is 0 or not finite.
    """

    def __init__(self, parts: Mapping[Scorer[Any, Any], float]):
        if not parts:
            raise ConfigError("WeightedScorer: parts is empty; give at least one scorer with its weight")
        for scorer, weight in parts.items():
            if not math.isfinite(weight) or weight == 0:
                message = f"the weight of {type(scorer).__name__} is {weight:g}, expected a finite number other than 0"
                raise ConfigError(f"WeightedScorer: {message}; change it, or leave the scorer out")
        self.parts = dict(parts)

    def score(self, x: Sequence[Any]) -> list[float]:
        columns = [[weight * score for score in scorer.score(x)] for scorer, weight in self.parts.items()]
        return [math.fsum(row) for row in zip(*columns, strict=True)]


class CachedScorer(Scorer[Any, Any]):
    """Caches another scorer's scores and calls it in batches, once per distinct text.

    Example: `CachedScorer(ClassifierScorer("folder"), batch_size=16)`.

    Args:
        scorer: The scorer to wrap.
        max_texts: Size of the cache; the least recently used scores are dropped.
        batch_size: Texts per call; None: all at once.
    """

    def __init__(self, scorer: Scorer[Any, Any], *, max_texts: int = 10_000, batch_size: int | None = None):
        self.scorer, self.max_texts, self.batch_size = scorer, max_texts, batch_size
        self._cache: OrderedDict[Any, float] = OrderedDict()

    def score(self, x: Sequence[Any]) -> list[float]:
        """Returns the scores; the wrapped scorer is called only for texts that are not cached."""
        keys = [_make_key(text) for text in x]
        missing = {key: text for key, text in zip(keys, x, strict=True) if key not in self._cache}
        scores = {key: self._cache[key] for key in keys if key in self._cache}
        texts, size = list(missing.values()), self.batch_size or max(1, len(missing))
        new = [s for start in range(0, len(texts), size) for s in self.scorer.score(texts[start : start + size])]
        scores.update(zip(missing, map(float, new), strict=True))
        for key in keys:
            self._cache[key] = scores[key]
            self._cache.move_to_end(key)
        while len(self._cache) > self.max_texts:
            self._cache.popitem(last=False)
        return [scores[key] for key in keys]


def _make_key(text: Any) -> Any:
    """Returns the cache key of a text; responses with equal text but different tool calls get different keys."""
    message = getattr(text, "message", None)
    return (text, repr(message)) if message else text
