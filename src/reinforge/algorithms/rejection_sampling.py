"""Rejection sampling: supervised fine-tuning on the best of each group, or on what is good enough.

`rejection_sampling` keeps the best `best_k` siblings (Llama 2, arXiv:2307.09288, section 3.2.3). `expert_iteration`
is the same with other defaults: all that reach a reward (arXiv:1705.08439; for language models arXiv:2403.04642).

    loss = -mean_t log p(t) over the tokens of the kept trajectories

Differs from the papers: each epoch goes on from the weights of the one before, on that epoch's own samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field, model_validator

from reinforge.algorithms.samples import on_mask, samples_of_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup

BEST_K = "Siblings kept of each group, the best first; null: all."
MIN_REWARD = "Least reward of what is kept; null: any."


class RejectionSamplingConfig(AlgorithmConfig, name="rejection_sampling"):
    """Settings of rejection sampling: the best of each group."""

    best_k: int | None = Field(default=1, ge=1, description=BEST_K)
    min_reward: float | None = Field(default=None, description=MIN_REWARD)

    @model_validator(mode="after")
    def _rejects(self) -> RejectionSamplingConfig:
        if self.best_k is None and self.min_reward is None:
            raise ValueError("with neither best_k nor min_reward nothing is rejected; use _type: sft for that")
        return self


class ExpertIterationConfig(RejectionSamplingConfig, name="expert_iteration"):
    """Settings of expert iteration: everything that was solved."""

    best_k: int | None = Field(default=None, ge=1, description=BEST_K)
    min_reward: float | None = Field(default=1.0, description=f"{MIN_REWARD} 1 is a solved example of most rewards.")


class RejectionSampling(Algorithm):
    """Every token of what is kept counts one; without a least reward, groups without spread have no best."""

    loss = LossSpec("cross_entropy")
    offline = True

    def __init__(self, config: RejectionSamplingConfig | None = None):
        self.config = config or RejectionSamplingConfig()
        self.needs_groups = self.config.min_reward is None

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False where nothing is good enough."""
        return bool(self.keep(group.trajectories))

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of what is kept."""
        return samples_of_groups(
            [
                TrajectoryGroup.model_construct(group_id=group.group_id, trajectories=self.keep(group.trajectories))
                for group in groups
            ]
        )

    def keep(self, siblings: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the siblings to imitate; of equal rewards the earlier one is better."""
        floor = self.config.min_reward
        good = [t for t in siblings if t.is_trainable and (floor is None or t.reward >= floor)]
        return sorted(good, key=lambda trajectory: -trajectory.reward)[: self.config.best_k]

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns 1 on every trained token."""
        return [on_mask(sample, 1.0) for sample in samples]


@register_algorithm(config_type=RejectionSamplingConfig)
async def rejection_sampling(config: RejectionSamplingConfig, builder: Any) -> AsyncIterator[RejectionSampling]:
    """Yields rejection sampling."""
    yield RejectionSampling(config)


@register_algorithm(config_type=ExpertIterationConfig)
async def expert_iteration(config: ExpertIterationConfig, builder: Any) -> AsyncIterator[RejectionSampling]:
    """Yields expert iteration."""
    yield RejectionSampling(config)
