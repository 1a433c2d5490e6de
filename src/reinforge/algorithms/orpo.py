"""Odds ratio preference optimization (ORPO, arXiv:2403.07691, eq. 6 and 7): imitation and preference in one loss.

    loss = -log P(y_w) - odds_ratio_coef log sigma(log odds(y_w) - log odds(y_l)),    odds = P / (1 - P)

log P is the mean log-prob of a reply's tokens (eq. 2). The first term imitates the preferred reply, the second one
makes the other reply less likely. There is no reference model.

Differs from the paper: in a run the pairs are the policy's own samples, collected each epoch and ranked by reward;
log-probs use the sampling temperature.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.preference import PairConfig, ReferenceFreePreference
from reinforge.registry import register_algorithm


class ORPOConfig(PairConfig, name="orpo"):
    """Settings of ORPO."""

    odds_ratio_coef: float = Field(
        default=0.1,
        gt=0,
        description="Weight of the odds ratio next to the preferred reply's mean negative log-likelihood (the paper's "
        "lambda, 0.1 to 0.25 there).",
    )


@register_algorithm(config_type=ORPOConfig)
class ORPO(ReferenceFreePreference):
    """Pairs of siblings; imitates the preferred one and lowers the odds of the other."""

    config: ORPOConfig
    config_type = ORPOConfig
    loss_name, loss_settings = "orpo", ("odds_ratio_coef",)

    @property
    def rejected_credit(self) -> float:
        return -self.config.odds_ratio_coef
