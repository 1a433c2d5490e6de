"""A running check of the promise, on the requests that both models answer: has the mixture become worse than allowed?

The loss of a request is the teacher's score minus the student's if the router would keep the student's reply, else 0.
As long as the mean loss is at most the margin, whatever was seen before, the capital of a gambler who bets on larger
losses stays below 1 / p with a probability of 1 - p, forever (Ville; Waudby-Smith and Ramdas 2023, arXiv:2010.09686).
A drift may come late, when a gambler who began at the start has lost everything. So a new one begins with every
request, with a share of the money that falls with the number of requests t, as 1 / ((t + 1) log(t + 1)^2): the sum is
still such a capital (an e-process of the Shiryaev-Roberts kind: Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

BETS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Shares of the largest bet that never loses everything; small ones find small drifts."""
TOTAL = 2.11
"""The sum of 1 / (t log(t)^2) over t from 2 on, by which the shares of all gamblers are divided."""

CALM = 1.0
"""Capital below which nothing speaks against the promise: its expectation is at most this while the promise holds."""

DriftState = Literal["ok", "raise", "stop"]


@dataclass
class DriftCheck:
    """Watches one router; `asdict` and `DriftCheck(**values)` keep it over restarts.

    Example: margin 0.02, 20 requests without a loss, then each loses 1: the sixth of these is a `raise`, the ninth a
    `stop`.
    """

    margin: float
    alpha_raise: float = 0.2
    """While the promise holds, the probability that the check ever asks to raise the threshold is at most this."""
    alpha_stop: float = 0.05
    """And that it ever stops the student's answers."""
    num_checked: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * len(BETS))  # the capital by size of the bets
    state: DriftState = "ok"

    def __post_init__(self) -> None:
        if len(self.sums) != len(BETS):
            raise ValueError(f"expected {len(BETS)} sums, found {len(self.sums)}")

    def add(self, loss: float) -> DriftState:
        """Takes the loss of one more request, in [-1, 1], and returns what to do; `stop` is final."""
        if not -1 <= loss <= 1:
            raise ValueError(f"expected a loss from -1 to 1, found {loss}")
        self.num_checked += 1
        t = self.num_checked + 1
        begun = 1 / (t * math.log(t) ** 2 * TOTAL)
        gain = (loss - self.margin) / (1 + self.margin)
        self.sums = [(total + begun) * (1 + bet * gain) for total, bet in zip(self.sums, BETS, strict=True)]
        if self.state == "stop" or self.capital >= 1 / self.alpha_stop:
            self.state = "stop"
        else:
            self.state = "raise" if self.capital >= 1 / self.alpha_raise else "ok"
        return self.state

    @property
    def capital(self) -> float:
        """The evidence against the promise; 20 is that of a p-value of 0.05."""
        return sum(self.sums) / len(BETS)


def choose_num_kept(checks: Sequence[DriftCheck]) -> int:
    """Returns how many thresholds to keep after a request, by the check of each of them, the strictest first.

    A threshold whose check says `raise` is left for the lowest one of which nothing speaks against the promise. Nothing
    stays local if there is none and the check of the strictest one says `stop`. While the promise holds, the
    probability of the first is at most `alpha_raise`, and that of the second `alpha_stop`.

    Example: capitals of 0.1, 0.8, 3.0 and 5.2 -> 2.
    """
    if not checks or checks[-1].state == "ok":
        return len(checks)
    calm = (number for number, check in enumerate(checks, 1) if check.capital < CALM)
    return max(calm, default=int(checks[0].state != "stop"))
