"""Identity preference optimisation (IPO, arXiv:2310.12036, eq. 17): the margin has a target of 1 / (2 beta).

    loss = (h - 1 / (2 beta))^2,    h as in DPO

DPO drives the margin of a consistently ranked pair towards infinity, whatever its beta. IPO does not.

Differs from the paper: pairs, temperature and reference are as in `dpo`; the paper's tau is called beta.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import Field

from reinforge.algorithms.preference import Preference, PreferenceConfig
from reinforge.interfaces import Builder
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec


class IPOConfig(PreferenceConfig, name="ipo"):
    """Settings of IPO."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="The margin's target is 1 / (2 beta) nats: 5 nats at 0.1; with length_normalised, nats per token.",
    )


class IPO(Preference):
    """Pairs of siblings with the squared distance of their margin from its target."""

    config: IPOConfig

    def __init__(self, config: IPOConfig | None = None):
        super().__init__(config or IPOConfig())
        params = {"beta": self.config.beta, "length_normalised": self.config.length_normalised}
        self.loss = LossSpec("ipo", params)


@register_algorithm(config_type=IPOConfig)
async def ipo(config: IPOConfig, builder: Builder) -> AsyncIterator[IPO]:
    """Yields IPO."""
    yield IPO(config)
