"""A running check of whether the scores of users have shifted, up or down.

    scores so far 0.2, 0.5, 0.5, then 0.5  =>  rank p from 1/4 to 4/4, drawn at random among equal scores

As long as the order of the scores tells nothing, p is uniform on [0, 1] and independent of the ranks before, whatever
the distribution of the scores (conformal p-values: Vovk, Nouretdinov and Gammerman 2003; Vovk 2021, arXiv:1906.09256).
So a gambler who bets on large ranks, 2 p - 1, or on small ones, 1 - 2 p, gains nothing on average. `DriftCheck`, which
lets a new gambler begin with every score, limits the probability of a false alarm, however often it is looked at.

A score counts only if its user is not among the newest users that counted, so that few users cannot make a shift.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Literal

from reinforge.routing.drift import DriftCheck
from reinforge.types.seeding import stable_seed

Shift = Literal["up", "down"]


class ShiftCheck:
    """Watches the scores of one version.

    Attributes:
        num_left: Scores that have to count without another shift until the distribution is stable again.

    Args:
        alpha: Without a shift, the probability that one is ever found is at most this.
        num_others: A user counts again after so many others.
        num_stable: After a shift, the distribution is stable once so many scores have counted.

    Example: alpha 0.025; 100 users score 1, then others 0: the 20th of these or so reveals a shift down.
    """

    def __init__(self, alpha: float, num_others: int, num_stable: int):
        self._alpha, self._num_stable = alpha, num_stable
        self._recent: deque[str] = deque(maxlen=num_others)
        self.num_counted = self.num_left = 0
        self._begin()

    def _begin(self) -> None:
        self._scores: list[float] = []  # in ascending order
        self._checks: dict[Shift, DriftCheck] = {
            direction: DriftCheck(margin=0.0, alpha_stop=self._alpha / 2) for direction in ("up", "down")
        }

    def add(self, user: str, score: float) -> Shift | None:
        """Takes a score of a user, and returns the shift that it reveals; after one, the check starts over."""
        if user in self._recent:
            return None
        self._recent.append(user)
        self.num_counted, self.num_left = self.num_counted + 1, max(self.num_left - 1, 0)
        num_below = bisect_left(self._scores, score)
        num_equal = bisect_right(self._scores, score) - num_below + 1
        drawn = stable_seed(self.num_counted, user) / 2**63
        rank = (num_below + drawn * num_equal) / (len(self._scores) + 1)
        insort(self._scores, score)
        for direction, check in self._checks.items():
            if check.add(2 * rank - 1 if direction == "up" else 1 - 2 * rank) == "stop":
                self.num_left = self._num_stable
                self._begin()
                return direction
        return None
