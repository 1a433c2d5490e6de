"""Multi-agent LLM training (MALT, arXiv:2412.01928): preference pairs at every decision of every agent.

This is DPO over the trees of the trajectory builder `_type: agents`. A protocol with `num_responses` above 1 samples
several replies in every round. A reply's value is its agent's mean reward over the dialogues that follow, and sibling
replies form pairs, from the first round on.

    replies of value [0.75, 0.25]  ->  the first is preferred, even if both are above a fixed threshold

Differs from the paper: labels come from comparing siblings, not from a threshold; supervised training on the preferred
replies is a term of the DPO loss (`sft_coef`) instead of a stage before it; all agents may share one model, each with
the same weight.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import Field

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.interfaces import Builder
from reinforge.registry import register_algorithm


class MALTConfig(DPOConfig, name="malt"):
    """Settings of MALT: those of DPO with other defaults."""

    sft_coef: float = Field(
        default=1.0, ge=0, description="Weight of the preferred reply's mean negative log-likelihood; RPO uses 1."
    )
    drop_duplicates: bool = Field(
        default=True, description="Train identical pairs of an agent (equal to the token) only once."
    )


class MALT(DPO):
    """DPO between the branches of dialogues."""

    def __init__(self, config: MALTConfig | None = None):
        super().__init__(config or MALTConfig())


@register_algorithm(config_type=MALTConfig)
async def malt(config: MALTConfig, builder: Builder) -> AsyncIterator[MALT]:
    """Yields MALT."""
    yield MALT(config)
