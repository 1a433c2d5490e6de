"""Group relative policy optimisation (GRPO, arXiv:2402.03300, eq. 3 and section 4.1.2).

Credit of a trajectory is its reward relative to its siblings', the same for each of its tokens; the loss is PPO's
clipped surrogate, averaged over the tokens of a trajectory and then over trajectories.

    A_i = (R_i - mean(R)) / std(R)

Differs from the paper: `kl_coef` is 0 unless set (no reference model in memory).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from reinforge.algorithms.policy_gradient import ClippedConfig, KlEstimator, PolicyGradient, Scale
from reinforge.registry import register_algorithm


class GRPOConfig(ClippedConfig, name="grpo"):
    """Settings of GRPO; the defaults are the paper's, without the KL term."""

    scale_advantages: Scale = True
    kl_estimator: KlEstimator = "k3"


class GRPO(PolicyGradient):
    """Credit relative to siblings, clipped policy gradient."""

    config: GRPOConfig

    def __init__(self, config: GRPOConfig | None = None):
        super().__init__(config or GRPOConfig())


@register_algorithm(config_type=GRPOConfig)
async def grpo(config: GRPOConfig, builder: Any) -> AsyncIterator[GRPO]:
    """Yields GRPO."""
    yield GRPO(config)
