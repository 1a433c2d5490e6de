"""Multi-agent LLM training (MALT, arXiv:2412.01928): preference pairs at every decision of every agent.

It is DPO over the trees of the trajectory builder `_type: agents`, and nothing else: a protocol with `num_responses`
above 1 says every round several times, a reply is worth what its agent earns on average over the dialogues that follow,
and siblings, the first round's too, are compared with each other.

    replies worth [0.75, 0.25]  ->  the first is preferred, though both may be above any fixed mid-point

Differs from the paper: no threshold makes labels; supervised training on the preferred replies comes not before DPO but
with it (`sft_coef`); every agent may share one model, and each counts the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.registry import register_algorithm


class MALTConfig(DPOConfig, name="malt"):
    """Settings of MALT: DPO's, with other defaults."""

    sft_coef: float = Field(
        default=1.0, ge=0, description="Weight of the preferred reply's mean negative log-likelihood; RPO uses 1."
    )
    drop_duplicates: bool = Field(
        default=True, description="Pairs of one agent of which both replies are equal to the token are trained once."
    )


class MALT(DPO):
    """DPO between the branches of dialogues."""

    def __init__(self, config: MALTConfig | None = None):
        super().__init__(config or MALTConfig())


@register_algorithm(config_type=MALTConfig)
async def malt(config: MALTConfig, builder: Any) -> AsyncIterator[MALT]:
    """Yields MALT."""
    yield MALT(config)
