"""Advantages on plain numbers: group-relative, leave-one-out, normalized over a batch, and returns by turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from reinforge.types.sample import FloatArray


def group_relative_advantage(
    reward: float, group_rewards: Sequence[float], *, scale: bool = False, eps: float = 1e-4
) -> float:
    """Returns a reward minus its group's mean, divided by the group's population deviation (+ `eps`) if `scale`.

    GRPO (arXiv:2402.03300, section 4.1.2) divides. Dr. GRPO (arXiv:2503.20783) does not, and shows that dividing
    favors groups that are almost always right or wrong.

    Example: `group_relative_advantage(1, [1, 0, 0, 1])` -> 0.5; scaled by the population deviation 0.5: 1 (less `eps`).
    """
    mean = statistics.fmean(group_rewards)
    if not scale:
        return reward - mean
    deviation = math.sqrt(statistics.fmean((other - mean) ** 2 for other in group_rewards))
    return (reward - mean) / (deviation + eps)


def leave_one_out_advantage(reward: float, group_rewards: Sequence[float]) -> float:
    """Returns a reward minus the mean of the others (RLOO, arXiv:2402.14740, section 2.4).

    The mean of the others does not depend on the reward itself, so the baseline adds no bias. The result equals
    G / (G - 1) times the reward minus the mean of all G; it is 0 for a group of one.

    Example: `leave_one_out_advantage(1, [1, 0, 0, 1])` -> 1 - 1/3 = 0.667.
    """
    count = len(group_rewards)
    return (reward - statistics.fmean(group_rewards)) * count / (count - 1) if count > 1 else 0.0


def normalize_over_batch(values: Sequence[FloatArray], *, eps: float = 1e-8) -> list[FloatArray]:
    """Returns arrays with the mean of all entries subtracted, divided by the population standard deviation of all.

    Example: [[1, 1], [0]] -> mean 2/3, deviation 0.471 -> [[0.707, 0.707], [-1.414]]; 0 if all entries are equal.
    """
    entries = np.concatenate(values).astype(np.float64) if values else np.zeros(0)
    if not len(entries):
        return list(values)
    mean, deviation = entries.mean(), entries.std()
    return [((array - mean) / (deviation + eps)).astype(np.float32) for array in values]


def compute_returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Returns each turn's return: the discounted sum of its own and later rewards, sum_j discount^j r_(k+j).

    Example: rewards [1, 0, 2], discount 0.5 -> [1 + 0 + 0.5, 0 + 1, 2] = [1.5, 1, 2].
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]
