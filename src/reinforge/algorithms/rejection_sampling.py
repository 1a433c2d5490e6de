"""Rejection sampling: supervised fine-tuning on the best of each group (Llama 2, arXiv:2307.09288, section 3.2.3).

    loss = -mean_t log p(t) over the tokens of the kept trajectories

Differs from the paper: each epoch goes on from the weights of the one before, on that epoch's own samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from reinforge.algorithms.samples import on_mask, samples_of_groups, without_duplicates
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup

DropDuplicates = Annotated[bool, Field(description="Rows of one agent that are equal to the token are trained once.")]


class ImitationConfig(AlgorithmConfig):
    """What all can be told that imitate a choice of their own trajectories."""

    drop_duplicates: DropDuplicates = False


class RejectionSamplingConfig(ImitationConfig, name="rejection_sampling"):
    """Settings of rejection sampling: the best of each group."""

    best_k: int | None = Field(default=1, ge=1, description="Siblings kept of each group, the best first; null: all.")
    min_reward: float | None = Field(default=None, description="Least reward of what is kept; null: any.")

    @model_validator(mode="after")
    def _rejects(self) -> RejectionSamplingConfig:
        if self.best_k is None and self.min_reward is None:
            raise ValueError("with neither best_k nor min_reward nothing is rejected; use _type: sft for that")
        return self


class RejectionSampling(Algorithm):
    """Every token of what is kept counts one; without a least reward, groups without spread have no best."""

    config: ImitationConfig
    loss = LossSpec("cross_entropy")
    offline = True

    def __init__(self, config: RejectionSamplingConfig | None = None):
        self.config = config = config or RejectionSamplingConfig()
        self.best_k, self.min_reward = config.best_k, config.min_reward
        self.needs_groups = config.min_reward is None

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False where nothing is good enough."""
        return bool(self.keep(group.trajectories))

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of what is kept."""
        samples = samples_of_groups(
            [
                TrajectoryGroup.model_construct(group_id=group.group_id, trajectories=self.keep(group.trajectories))
                for group in groups
            ]
        )
        return without_duplicates(samples) if self.config.drop_duplicates else samples

    def keep(self, siblings: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the siblings to imitate; of equal rewards the earlier one is better."""
        floor = self.min_reward
        good = [t for t in siblings if t.is_trainable and (floor is None or t.reward >= floor)]
        return sorted(good, key=lambda trajectory: -trajectory.reward)[: self.best_k]

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns 1 on every trained token."""
        return [on_mask(sample, 1.0) for sample in samples]


@register_algorithm(config_type=RejectionSamplingConfig)
async def rejection_sampling(config: RejectionSamplingConfig, builder: Any) -> AsyncIterator[RejectionSampling]:
    """Yields rejection sampling."""
    yield RejectionSampling(config)
