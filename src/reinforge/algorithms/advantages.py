"""Credit of siblings relative to each other, on plain numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


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
    advantage = reward - statistics.fmean(siblings)
    return advantage / (statistics.pstdev(siblings) + eps) if scale else advantage
