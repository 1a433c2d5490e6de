"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.

All trained turns count, whatever their reward. With `min_reward` only good trajectories are kept, which makes this
rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from reinforge.algorithms.rejection_sampling import DropDuplicates
from reinforge.algorithms.samples import drop_duplicate_samples, fill_trained_tokens, samples_from_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class SFTConfig(AlgorithmConfig, name="sft"):
    """Settings of supervised fine-tuning."""

    min_reward: float | None = Field(default=None, description="Train only on trajectories with at least this reward.")
    drop_duplicates: DropDuplicates = False


@register_algorithm(config_type=SFTConfig)
class SFT(Algorithm):
    """Imitates all trajectories; every trained token has weight 1."""

    loss = LossSpec("cross_entropy")
    offline = True

    def __init__(self, config: SFTConfig | None = None):
        self.config = config or SFTConfig()

    def has_signal(self, group: TrajectoryGroup) -> bool:
        return bool(self.select_trajectories(group.trajectories))

    def select_trajectories(self, siblings: Sequence[Trajectory]) -> list[Trajectory]:
        floor = self.config.min_reward
        return [t for t in siblings if t.is_trainable and (floor is None or t.reward >= floor)]

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        floor = self.config.min_reward
        samples = [sample for sample in samples_from_groups(groups) if floor is None or sample.reward >= floor]
        return drop_duplicate_samples(samples) if self.config.drop_duplicates else samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        return [fill_trained_tokens(sample, 1.0) for sample in samples]
