"""Multi-agent LLM training (MALT, arXiv:2412.01928): preference pairs at every decision of every agent.

This is DPO over the trees of the trajectory builder `_type: agents`. A protocol with `num_responses` above 1 samples
several replies in every round. A reply's value is its agent's mean reward over the dialogues that follow, and sibling
replies form pairs, from the first round on.

    replies of value [0.75, 0.25]  ->  the first is preferred, even if both are above a fixed threshold

The first `num_initial_ei_epochs` epochs are expert iteration: single dialogues, of which the good ones are imitated.

Differs from the paper: labels come from comparing siblings, not from a threshold; supervised training on the preferred
replies is a term of the DPO loss (`sft_coef`) instead of a stage before it; all agents may share one model, each with
the same weight.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from pydantic import Field

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration, ExpertIterationConfig
from reinforge.interfaces import Algorithm, Builder
from reinforge.registry import register_algorithm


class MALTConfig(DPOConfig, name="malt"):
    """Settings of MALT: those of DPO with other defaults."""

    sft_coef: float = Field(
        default=1.0, ge=0, description="Weight of the preferred reply's mean negative log-likelihood; RPO uses 1."
    )
    drop_duplicates: bool = Field(
        default=True, description="Train identical pairs of an agent (equal to the token) only once."
    )
    num_initial_ei_epochs: int = Field(
        default=0, ge=0, description="Epochs of expert iteration on single dialogues before the first epoch with trees."
    )
    initial_ei: ExpertIterationConfig | None = Field(
        default=None, description="Settings of these epochs, as of expert_iteration; null: its defaults."
    )


class MALT(DPO):
    """DPO between the branches of dialogues, after epochs of expert iteration if the configuration asks for them."""

    config: MALTConfig
    config_type = MALTConfig

    def __init__(self, config: MALTConfig | None = None, seed: int = 0):
        super().__init__(config)
        self._initial = ExpertIteration(self.config.initial_ei, seed)

    def for_epoch(self, epoch: int | None) -> Algorithm:
        return self if epoch is None or epoch >= self.config.num_initial_ei_epochs else self._initial


@register_algorithm(config_type=MALTConfig)
async def malt(config: MALTConfig, builder: Builder) -> AsyncIterator[MALT]:
    yield MALT(config, builder.config.finetuning.seed)
