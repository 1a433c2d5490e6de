"""Clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): every token keeps its gradient.

    l_t = -sg[min(r_t, 1 + clip_high)] A_i log p(t),    mean over all tokens

GRPO's clip removes the gradient of the tokens that changed most, often the rare ones that turn an argument. CISPO
limits their weight instead.

Differs from the paper: the paper does not state its `clip_high`; here weights are limited to 5.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from reinforge.algorithms.policy_gradient import KlEstimator, PolicyGradient, PolicyGradientConfig, Scale
from reinforge.registry import register_algorithm


class CISPOConfig(PolicyGradientConfig, name="cispo"):
    """Settings of CISPO."""

    clip_low: float | None = Field(
        default=None, gt=0, lt=1, description="The weight is clipped below at 1 - clip_low; null: not clipped below."
    )
    clip_high: float = Field(
        default=4.0,
        gt=0,
        description="The weight is clipped above at 1 + clip_high; far wider than GRPO's 0.2, as clipped tokens keep "
        "their gradient.",
    )
    loss_aggregation: Literal["sequence", "token"] = Field(
        default="token", description="Average over each trajectory first, or over all tokens at once."
    )
    scale_rewards: Scale = True
    kl_estimator: KlEstimator = "k3"


@register_algorithm(config_type=CISPOConfig)
class CISPO(PolicyGradient):
    """Scaled group-relative advantages, REINFORCE with clipped importance weights."""

    config_type = CISPOConfig
    loss_name, loss_settings = "cispo", ("clip_low", "clip_high")
