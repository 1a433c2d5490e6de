"""Group sequence policy optimization (GSPO, arXiv:2507.18071, eq. 5 to 7): the ratio of whole sequences is clipped.

    s_i = exp(mean_t log p(t) / p_old(t)),    loss_i = -min(s_i A_i, clip(s_i) A_i)

A reward belongs to a sequence, and so does the ratio that corrects for stale samples. A mean over n tokens varies about
sqrt(n) times less than a single token, so the clip range is three orders of magnitude narrower than GRPO's.

Differs from the paper: uses the token-level form (eq. 13, 14), which also takes advantages by turn.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.policy_gradient import KlEstimator, PolicyGradient, PolicyGradientConfig, Scale
from reinforge.registry import register_algorithm

NARROW = "suits replies of hundreds of tokens; use about 0.02 for replies of a few tokens"


class GSPOConfig(PolicyGradientConfig, name="gspo"):
    """Settings of GSPO; the defaults are the paper's."""

    clip_low: float = Field(
        default=3e-4,
        gt=0,
        lt=1,
        description=f"The sequence's ratio is clipped below at 1 - clip_low; the default {NARROW}.",
    )
    clip_high: float = Field(
        default=4e-4, gt=0, description=f"The sequence's ratio is clipped above at 1 + clip_high; the default {NARROW}."
    )
    scale_rewards: Scale = True
    kl_estimator: KlEstimator = "k3"


@register_algorithm(config_type=GSPOConfig)
class GSPO(PolicyGradient):
    """Scaled group-relative advantages, policy gradient clipped by sequence, mean over trajectories."""

    config_type = GSPOConfig
    loss_name, loss_settings = "gspo", ("clip_low", "clip_high")
