"""Credit on plain numbers: relative to siblings, to a batch, or by turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from reinforge.types.sample import FloatArray


def relative_to(reward: float, siblings: Sequence[float], *, scale: bool = False, eps: float = 1e-4) -> float:
    """Returns a reward minus its group's mean, divided by the group's standard deviation if `scale`.

    GRPO (arXiv:2402.03300, section 4.1.2) divides; Dr. GRPO (arXiv:2503.20783) shows that dividing favours groups
    that are almost always right or wrong, and does not.

    Example: `relative_to(1, [1, 0, 0, 1])` -> 0.5; scaled by the population deviation 0.5: 1 (less `eps`).

    Args:
        reward: The trajectory's own.
        siblings: Those of the whole group, itself included.
        scale: Divide by the population standard deviation plus `eps`.
        eps: Keeps the quotient finite, in the unit of the rewards.
    """
    mean = statistics.fmean(siblings)
    if not scale:
        return reward - mean
    deviation = math.sqrt(statistics.fmean((other - mean) ** 2 for other in siblings))
    return (reward - mean) / (deviation + eps)


def leave_one_out(reward: float, siblings: Sequence[float]) -> float:
    """Returns a reward minus the mean of the others (RLOO, arXiv:2402.14740, section 2.4).

    The mean of the others does not depend on the reward itself, so the baseline adds no bias. It equals
    G / (G - 1) times the reward less the mean of all G; 0 where there are no others.

    Example: `leave_one_out(1, [1, 0, 0, 1])` -> 1 - 1/3 = 0.667.

    Args:
        reward: The trajectory's own.
        siblings: Those of the whole group, itself included.
    """
    count = len(siblings)
    return (reward - statistics.fmean(siblings)) * count / (count - 1) if count > 1 else 0.0


def batch_normalised(values: Sequence[FloatArray], *, eps: float = 1e-8) -> list[FloatArray]:
    """Returns arrays less the mean of all their entries, divided by the population deviation of all.

    Example: [[1, 1], [0]] -> mean 2/3, deviation 0.471 -> [[0.707, 0.707], [-1.414]].

    Args:
        values: One array a sample; together they are the batch.
        eps: Added to the deviation; where all entries are equal the result is 0.
    """
    entries = np.concatenate(values).astype(np.float64) if values else np.zeros(0)
    if not len(entries):
        return list(values)
    mean, deviation = entries.mean(), entries.std()
    return [((array - mean) / (deviation + eps)).astype(np.float32) for array in values]


def turn_returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Returns for each turn the discounted sum of the rewards of this and later turns, sum_j discount^j r_(k+j).

    Example: rewards [1, 0, 2], discount 0.5 -> [1 + 0 + 0.5, 0 + 1, 2] = [1.5, 1, 2].
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]
