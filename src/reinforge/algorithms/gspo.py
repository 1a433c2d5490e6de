"""Group sequence policy optimisation (GSPO, arXiv:2507.18071, eq. 5 to 7): the ratio of whole sequences is clipped.

    s_i = exp(mean_t log p(t) / p_old(t)),    loss_i = -min(s_i A_i, clip(s_i) A_i)

A reward belongs to a sequence; so does the ratio that corrects for stale samples. A mean over n tokens varies about
sqrt(n) times less than one of them, which is why the clip is three orders of magnitude narrower than GRPO's.

Differs from the paper: it is written by tokens (eq. 13, 14), so that credit by turn works too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.algorithms.policy_gradient import KlEstimator, PolicyGradient, PolicyGradientConfig, Scale
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec

NARROW = "for replies of hundreds of tokens; for replies of a few tokens take about 0.02"


class GSPOConfig(PolicyGradientConfig, name="gspo"):
    """Settings of GSPO; the defaults are the paper's."""

    clip_low: float = Field(
        default=3e-4, gt=0, lt=1, description=f"The sequence's ratio is clipped below at 1 - clip_low: {NARROW}."
    )
    clip_high: float = Field(
        default=4e-4, gt=0, description=f"The sequence's ratio is clipped above at 1 + clip_high: {NARROW}."
    )
    scale_advantages: Scale = True
    kl_estimator: KlEstimator = "k3"


class GSPO(PolicyGradient):
    """Scaled credit, policy gradient clipped by sequence, mean over trajectories."""

    config: GSPOConfig

    def __init__(self, config: GSPOConfig | None = None):
        super().__init__(config or GSPOConfig())

    def loss_of(self) -> LossSpec:
        """Returns GSPO's loss."""
        return self.spec("gspo", ["clip_low", "clip_high"])


@register_algorithm(config_type=GSPOConfig)
async def gspo(config: GSPOConfig, builder: Any) -> AsyncIterator[GSPO]:
    """Yields GSPO."""
    yield GSPO(config)
