"""The base class of scorers: texts in, scores out; a higher score means a worse text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from reinforge.redteam.core.common import ActionT, StateT


class Scorer(ABC, Generic[StateT, ActionT]):
    """Scores texts: how clearly each one shows the failure that the attack looks for.

    Example:
        class Shouts(Scorer):
            def score(self, x):
                return [float(text.isupper()) for text in x]

        Shouts().score(["HELLO", "hello"])  # [1.0, 0.0]
    """

    @abstractmethod
    def score(self, x: Sequence[Any]) -> Sequence[float]:
        """Returns one score per text, by convention in [0, 1]; one call has all texts, to score them as a batch."""
