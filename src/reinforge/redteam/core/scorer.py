"""Texts in, numbers out: the higher, the worse the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from reinforge.redteam.core.common import ActionT, StateT


class Scorer(ABC, Generic[StateT, ActionT]):
    """Says how much each text is of what is looked for.

    Example:
        class Shouts(Scorer):
            def score(self, x):
                return [float(text.isupper()) for text in x]

        Shouts().score(["HELLO", "hello"])  # [1.0, 0.0]
    """

    @abstractmethod
    def score(self, x: Sequence[Any]) -> Sequence[float]:
        """Returns one number a text, by convention in [0, 1].

        Args:
            x: The texts; all that are known at the same time, so that a model can read them together.
        """
