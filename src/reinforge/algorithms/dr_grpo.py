"""GRPO done right (Dr. GRPO, arXiv:2503.20783, section 3.2): GRPO without its two biases.

    A_i = R_i - mean(R),    loss_i = sum_t l_t / L with one constant L

Dividing by the standard deviation favors questions that are almost always or almost never solved. Dividing by a
trajectory's own length makes long wrong answers cheap. Dr. GRPO does neither.

Differs from the paper: the mean is over samples; a trajectory whose history was rewritten has several.
"""

from __future__ import annotations

from reinforge.algorithms.policy_gradient import Aggregation, ClippedConfig, KlEstimator, PolicyGradient
from reinforge.registry import register_algorithm


class DrGRPOConfig(ClippedConfig, name="dr_grpo"):
    """Settings of Dr. GRPO."""

    loss_aggregation: Aggregation = "constant"
    kl_estimator: KlEstimator = "k3"


@register_algorithm(config_type=DrGRPOConfig)
class DrGRPO(PolicyGradient):
    """Centered group-relative advantages, clipped policy gradient, sums divided by a constant."""

    config_type = DrGRPOConfig
