"""Soft adaptive policy optimization (SAPO, arXiv:2511.20347, eq. 5 and 6): a sigmoid gate instead of a clip.

    loss = -f(r) A,    f(r) = 4 / tau sigma(tau (r - 1)),    tau = tau_pos if A > 0 else tau_neg

At r = 1 the gradient is that of the unclipped ratio. It fades as the ratio moves away from 1 to either side, where a
clip would end it at once: by 4 p (1 - p) with p = sigma(tau (r - 1)). Tokens of negative advantage fade sooner, because
lowering one token raises all others of the vocabulary.

Differs from the paper: `tis_cap`, `kl_coef` and `entropy_coef` can be set, as in `grpo`.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.policy_gradient import KlEstimator, PolicyGradient, PolicyGradientConfig, Scale
from reinforge.registry import register_algorithm


class SAPOConfig(PolicyGradientConfig, name="sapo"):
    """Settings of SAPO; the defaults are the paper's."""

    tau_pos: float = Field(
        default=1.0, gt=0, description="Temperature of the gate where the advantage is positive; higher fades sooner."
    )
    tau_neg: float = Field(
        default=1.05,
        gt=0,
        description="Temperature of the gate where the advantage is negative; at least tau_pos is stable.",
    )
    scale_rewards: Scale = True
    kl_estimator: KlEstimator = "k3"


@register_algorithm(config_type=SAPOConfig)
class SAPO(PolicyGradient):
    """Scaled group-relative advantages, softly gated policy gradient, mean over trajectories."""

    config_type = SAPOConfig
    loss_name, loss_settings = "sapo", ("tau_pos", "tau_neg")
