"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

Every trained turn counts, whatever its reward; `min_reward` keeps the good trajectories only, which makes it
rejection sampling.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from reinforge.algorithms.rejection_sampling import DropDuplicates
from reinforge.algorithms.samples import on_mask, samples_of_groups, without_duplicates
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class SFTConfig(AlgorithmConfig, name="sft"):
    """Settings of supervised fine-tuning."""

    min_reward: float | None = Field(default=None, description="Train only on trajectories with at least this reward.")
    drop_duplicates: DropDuplicates = False


class SFT(Algorithm):
    """Every trained token counts one."""

    loss = LossSpec("cross_entropy")
    offline = True

    def __init__(self, config: SFTConfig | None = None):
        self.config = config or SFTConfig()

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False where no reward is high enough."""
        return bool(self.keep(group.trajectories))

    def keep(self, siblings: Sequence[Trajectory]) -> list[Trajectory]:
        """Returns the siblings to imitate: those whose reward is high enough."""
        floor = self.config.min_reward
        return [t for t in siblings if t.is_trainable and (floor is None or t.reward >= floor)]

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of the trajectories whose reward is high enough."""
        floor = self.config.min_reward
        samples = [sample for sample in samples_of_groups(groups) if floor is None or sample.reward >= floor]
        return without_duplicates(samples) if self.config.drop_duplicates else samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns 1 on every trained token."""
        return [on_mask(sample, 1.0) for sample in samples]


@register_algorithm(config_type=SFTConfig)
async def sft(config: SFTConfig, builder: Any) -> AsyncIterator[SFT]:
    """Yields SFT."""
    yield SFT(config)
