"""Direct preference optimization (DPO, arXiv:2305.18290, eq. 7) on pairs of siblings, or on pairs from a file.

    loss = -log sigma(beta h),    h = log p(y_w) / p_ref(y_w) - log p(y_l) / p_ref(y_l)

Options: `label_smoothing` (conservative DPO, for labels that may be wrong), `sft_coef` (adds the likelihood of the
preferred reply: RPO, arXiv:2404.19733, eq. 1) and `length_normalized` (as in Tulu 3, arXiv:2411.15124).

Differs from the paper: in a run the pairs are the policy's own samples, collected each epoch and ranked by reward;
log-probs use the sampling temperature; the reference is the model at the start of the run.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.preference import Preference, PreferenceConfig
from reinforge.registry import register_algorithm


class DPOConfig(PreferenceConfig, name="dpo"):
    """Settings of DPO; the defaults are the paper's."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="Share of pairs assumed to be mislabeled.")
    sft_coef: float = Field(
        default=0.0, ge=0, description="Weight of the preferred reply's mean negative log-likelihood; RPO uses 1."
    )


@register_algorithm(config_type=DPOConfig)
class DPO(Preference):
    """Pairs of siblings with a logistic loss of their margin."""

    config: DPOConfig
    config_type = DPOConfig
    loss_name, loss_settings = "dpo", ("beta", "label_smoothing", "sft_coef", "length_normalized")
