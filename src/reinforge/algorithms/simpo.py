"""Simple preference optimization (SimPO, arXiv:2405.14734, eq. 4 and 6): mean log-probs are the rewards.

    loss = -log sigma(beta (log P(y_w) - log P(y_l)) - gamma),    log P the mean log-prob of a reply's tokens

By the mean a long reply is not preferred for its length, and there is no reference model. `gamma` is the margin that
the rewards of a pair should differ by.

Differs from the paper: in a run the pairs are the policy's own samples, collected each epoch and ranked by reward;
log-probs use the sampling temperature; `sft_coef` adds the likelihood of the preferred reply, as CPO does
(arXiv:2401.08417), and is off by default.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.preference import PairConfig, ReferenceFreePreference
from reinforge.registry import register_algorithm


class SimPOConfig(PairConfig, name="simpo"):
    """Settings of SimPO; the defaults are the paper's for a base model."""

    beta: float = Field(
        default=2.0, gt=0, description="Scale of the difference of mean log-probs; 2 to 2.5 in the paper."
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        description="Margin by which the scaled difference should exceed 0; about half of beta is usual.",
    )
    sft_coef: float = Field(
        default=0.0, ge=0, description="Weight of the preferred reply's mean negative log-likelihood."
    )


@register_algorithm(config_type=SimPOConfig)
class SimPO(ReferenceFreePreference):
    """Pairs of siblings with a logistic loss of the difference of their mean log-probs."""

    config_type = SimPOConfig
    loss_name, loss_settings = "simpo", ("beta", "gamma", "sft_coef")
