"""Rejection sampling: supervised fine-tuning on the best of each group (Llama 2, arXiv:2307.09288, section 3.2.3).

    loss = -mean_t log p(t) over the tokens of the kept trajectories

Differs from the paper: each epoch continues from the previous epoch's weights, on its own samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from reinforge.algorithms.samples import drop_duplicate_samples, fill_trained_tokens, samples_from_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup

DropDuplicates = Annotated[
    bool, Field(description="Train identical samples of an agent (equal to the token) only once.")
]


class ImitationConfig(AlgorithmConfig):
    """Settings of every algorithm that imitates selected trajectories of its own."""

    drop_duplicates: DropDuplicates = False


class RejectionSamplingConfig(ImitationConfig, name="rejection_sampling"):
    """Settings of rejection sampling; the default keeps the best of each group."""

    best_k: int | None = Field(default=1, ge=1, description="Number of best siblings to keep of each group; null: all.")
    min_reward: float | None = Field(default=None, description="Minimum reward to keep a trajectory; null: any.")

    @model_validator(mode="after")
    def _check_criteria(self) -> RejectionSamplingConfig:
        if self.best_k is None and self.min_reward is None:
            raise ValueError("without best_k and min_reward nothing is rejected; set one of them, or use _type: sft")
        return self


@register_algorithm(config_type=RejectionSamplingConfig)
class RejectionSampling(Algorithm):
    """Imitates the kept trajectories; without `min_reward`, groups with equal rewards have no best one."""

    config: ImitationConfig
    loss = LossSpec("cross_entropy")
    offline = True

    def __init__(self, config: RejectionSamplingConfig | None = None):
        self.config = config = config or RejectionSamplingConfig()
        self.best_k, self.min_reward = config.best_k, config.min_reward
        self.needs_groups = config.min_reward is None

    def has_signal(self, group: TrajectoryGroup) -> bool:
        return bool(self.select_trajectories(group.trajectories))

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        samples = samples_from_groups(
            [
                TrajectoryGroup.model_construct(
                    group_id=group.group_id, trajectories=self.select_trajectories(group.trajectories)
                )
                for group in groups
            ]
        )
        return drop_duplicate_samples(samples) if self.config.drop_duplicates else samples

    def select_trajectories(self, siblings: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the siblings to imitate, best first; ties go to the earlier one."""
        floor = self.min_reward
        good = [t for t in siblings if t.is_trainable and (floor is None or t.reward >= floor)]
        return sorted(good, key=lambda trajectory: -trajectory.reward)[: self.best_k]

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        return [fill_trained_tokens(sample, 1.0) for sample in samples]
