"""Clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): every token keeps its gradient.

    l_t = -sg[min(r_t, 1 + clip_high)] A_i log p(t),    mean over all tokens

GRPO's clip silences the tokens that changed most, often the rare ones that turn an argument; here their weight is
bounded instead.

Differs from the paper: it does not print its `clip_high`; ours lets a weight grow to 5.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import Field

from reinforge.algorithms.policy_gradient import KlEstimator, PolicyGradient, PolicyGradientConfig, Scale
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec


class CISPOConfig(PolicyGradientConfig, name="cispo"):
    """Settings of CISPO."""

    clip_low: float | None = Field(
        default=None, gt=0, lt=1, description="The weight is clipped below at 1 - clip_low; null: not at all."
    )
    clip_high: float = Field(
        default=4.0,
        gt=0,
        description="The weight is clipped above at 1 + clip_high; far wider than GRPO's 0.2, since it bounds a weight "
        "and silences nothing.",
    )
    aggregation: Literal["sequence", "token"] = Field(
        default="token", description="Mean over each trajectory first, or over all tokens alike."
    )
    scale_advantages: Scale = True
    kl_estimator: KlEstimator = "k3"


class CISPO(PolicyGradient):
    """Scaled credit, REINFORCE with clipped weights."""

    config: CISPOConfig

    def __init__(self, config: CISPOConfig | None = None):
        super().__init__(config or CISPOConfig())

    def loss_of(self) -> LossSpec:
        """Returns CISPO's loss."""
        return self.spec("cispo", ["clip_low", "clip_high"])


@register_algorithm(config_type=CISPOConfig)
async def cispo(config: CISPOConfig, builder: Any) -> AsyncIterator[CISPO]:
    """Yields CISPO."""
    yield CISPO(config)
