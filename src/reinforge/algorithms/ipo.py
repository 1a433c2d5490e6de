"""Identity preference optimisation (IPO, arXiv:2310.12036, eq. 17): the margin is to be 1 / (2 beta), not without end.

    loss = (h - 1 / (2 beta))^2,    h as in DPO

DPO drives the margin of a pair that is always ranked the same way towards infinity, whatever its beta; this does not.

Differs from the paper: pairs, temperature and reference are as in `dpo`; the paper's tau is called beta.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.algorithms.preference import Preference, PreferenceConfig
from reinforge.registry import register_algorithm
from reinforge.types.sample import LossSpec


class IPOConfig(PreferenceConfig, name="ipo"):
    """Settings of IPO."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="The target of the margin is 1 / (2 beta) nats: 5 at 0.1; with length_normalised nats a token.",
    )


class IPO(Preference):
    """Pairs of siblings, squared distance of their margin from its target."""

    config: IPOConfig

    def __init__(self, config: IPOConfig | None = None):
        super().__init__(config or IPOConfig())
        params = {"beta": self.config.beta, "length_normalised": self.config.length_normalised}
        self.loss = LossSpec("ipo", params)


@register_algorithm(config_type=IPOConfig)
async def ipo(config: IPOConfig, builder: Any) -> AsyncIterator[IPO]:
    """Yields IPO."""
    yield IPO(config)
