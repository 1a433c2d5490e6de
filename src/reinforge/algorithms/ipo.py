"""Identity preference optimization (IPO, arXiv:2310.12036, eq. 17): the margin has a target of 1 / (2 beta).

    loss = (h - 1 / (2 beta))^2,    h as in DPO

DPO drives the margin of a consistently ranked pair toward infinity, whatever its beta. IPO does not.

Differs from the paper: pairs, temperature and reference are as in `dpo`; the paper's tau is called beta.
"""

from __future__ import annotations

from pydantic import Field

from reinforge.algorithms.preference import Preference, PreferenceConfig
from reinforge.registry import register_algorithm


class IPOConfig(PreferenceConfig, name="ipo"):
    """Settings of IPO."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="The margin's target is 1 / (2 beta) nats: 5 nats at 0.1; with length_normalized, nats per token.",
    )


@register_algorithm(config_type=IPOConfig)
class IPO(Preference):
    """Pairs of siblings with the squared distance of their margin from its target."""

    config_type = IPOConfig
    loss_name, loss_settings = "ipo", ("beta", "length_normalized")
