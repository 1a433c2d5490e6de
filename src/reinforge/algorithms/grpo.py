"""Group relative policy optimization (GRPO, arXiv:2402.03300, eq. 3 and section 4.1.2).

All tokens of a trajectory share one advantage, its reward relative to its group. The loss is PPO's clipped surrogate,
averaged over the tokens of each trajectory and then over trajectories.

    A_i = (R_i - mean(R)) / std(R)

Differs from the paper: `kl_coef` is 0 unless set (no reference model in memory).
"""

from __future__ import annotations

from reinforge.algorithms.policy_gradient import ClippedConfig, KlEstimator, PolicyGradient, Scale
from reinforge.registry import register_algorithm


class GRPOConfig(ClippedConfig, name="grpo"):
    """Settings of GRPO; the defaults are the paper's, without the KL term."""

    scale_rewards: Scale = True
    kl_estimator: KlEstimator = "k3"


@register_algorithm(config_type=GRPOConfig)
class GRPO(PolicyGradient):
    """Group-relative advantages, clipped policy gradient."""

    config_type = GRPOConfig
