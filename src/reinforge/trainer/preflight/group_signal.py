"""How many groups have training signal, at the group size of the sample and at others.

A group whose replies all have the same reward teaches a group-relative algorithm nothing. Four replies of an example
show whether its group has signal at four replies; for larger groups a distribution over examples is fitted: an example
has the probabilities `p ~ Dirichlet(a * m)` of the possible rewards, where `m` are the shares of the rewards in the
whole sample and the concentration `a` is that of highest likelihood (a small one: each example is always solved or
never; a large one: all examples are alike). Then

    share(G) = 1 - sum_v E[p_v^G],   E[p_v^G] = prod_(i<G) (a m_v + i) / (a + i)

Example: every example is solved half of the time -> 1 - 2 * 0.5^4 = 0.875 of groups of 4, 0.992 of groups of 8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from reinforge.algorithms.curriculum import ZERO_VARIANCE

CONCENTRATIONS = [10 ** (exponent / 10) for exponent in range(-20, 31)]
"""Candidates for the concentration, 0.01 to 1000."""


def measure_signal_share(groups: Sequence[Sequence[float]], min_reward_diff: float = 0.0) -> float | None:
    """Returns the share of groups whose rewards differ by at least `min_reward_diff`; None: there is no group.

    Args:
        groups: The rewards of each example's replies; groups of fewer than two count as unknown.
    """
    known = [group for group in groups if len(group) > 1]
    if not known:
        return None
    least = max(ZERO_VARIANCE, min_reward_diff - ZERO_VARIANCE)
    return sum(max(group) - min(group) > least for group in known) / len(known)


def predict_signal_share(groups: Sequence[Sequence[float]], size: int, min_reward_diff: float = 0.0) -> float | None:
    """Returns the share of groups of `size` replies that will have signal; None: there is no group.

    Args:
        min_reward_diff: Rewards that differ by less count as equal.
    """
    counts = [_count_levels(group, max(ZERO_VARIANCE, min_reward_diff)) for group in groups if len(group) > 1]
    total: Counter[int] = sum(counts, Counter())
    if not total:
        return None
    shares = {level: count / total.total() for level, count in total.items()}
    best = max(CONCENTRATIONS, key=lambda a: sum(_log_likelihood(each, shares, a) for each in counts))
    return 1 - sum(math.exp(_log_all_equal(share, size, best)) for share in shares.values())


def _count_levels(rewards: Sequence[float], width: float) -> Counter[int]:
    return Counter(round(reward / width) for reward in rewards)


def _log_likelihood(counts: Mapping[int, int], shares: Mapping[int, float], concentration: float) -> float:
    """Returns the log-probability of an example's counts, up to a constant."""
    num = sum(counts.values())
    parts = (
        math.lgamma(concentration * shares[level] + count) - math.lgamma(concentration * shares[level])
        for level, count in counts.items()
    )
    return math.lgamma(concentration) - math.lgamma(concentration + num) + sum(parts)


def _log_all_equal(share: float, size: int, concentration: float) -> float:
    mean = concentration * share
    return math.lgamma(mean + size) - math.lgamma(mean) + math.lgamma(concentration) - math.lgamma(concentration + size)
