"""Decoupled clip and dynamic sampling (DAPO, arXiv:2503.14476, eq. 8 to 13): GRPO for long answers.

Four changes to GRPO: the clip range is wider above than below (`clip_high`), the loss averages over all tokens, groups
with equal rewards are replaced (the loop drops them, and `limits.min_groups` and `max_refills` collect others), and
answers near the length limit are penalized:

    R                                                       for n <= max_length - length_buffer
    R - (n - max_length + length_buffer) / length_buffer    up to n = max_length
    R - 1                                                   beyond; n is the trajectory's number of sampled tokens

With `overlong_filtering` (section 3.4), truncated trajectories (outcome `overlong`) are not trained on: their reward
says that they were long, not that they were wrong. It still counts in the mean of their group.

Differs from the paper: penalty and filter are off unless they are set.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from reinforge.algorithms.policy_gradient import (
    Aggregation,
    ClipHigh,
    ClippedConfig,
    KlEstimator,
    PolicyGradient,
    Scale,
)
from reinforge.registry import register_algorithm
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import Outcome, Trajectory, TrajectoryGroup


class DAPOConfig(ClippedConfig, name="dapo"):
    """Settings of DAPO; the defaults are the paper's, without its length penalty."""

    clip_high: ClipHigh = 0.28
    loss_aggregation: Aggregation = "token"
    scale_rewards: Scale = True
    kl_estimator: KlEstimator = "k3"
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Number of sampled tokens at which the length penalty reaches 1; null: no penalty.",
    )
    length_buffer: int = Field(
        default=64, ge=1, description="The penalty grows over this many tokens before max_length."
    )
    overlong_filtering: bool = Field(
        default=False,
        description="Do not train on trajectories whose outcome is overlong; they still count in their group's mean.",
    )

    @model_validator(mode="after")
    def _buffer_fits(self) -> DAPOConfig:
        if self.max_length is not None and self.length_buffer > self.max_length:
            raise ValueError(f"length_buffer {self.length_buffer} is more than max_length {self.max_length}")
        return self


@register_algorithm(config_type=DAPOConfig)
class DAPO(PolicyGradient):
    """Scaled group-relative advantages with a length penalty, clipped policy gradient, mean over tokens."""

    config: DAPOConfig
    config_type = DAPOConfig

    def has_signal(self, group: TrajectoryGroup) -> bool:
        return super().has_signal(group) and not all(self._is_filtered(trajectory) for trajectory in group.trajectories)

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of all groups, with the penalty taken off rewards and weight 0 for filtered ones."""
        groups = [self._penalize(group) for group in groups] if self.config.max_length else groups
        samples = super().build_samples(groups)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for sample in samples:
            if self._is_filtered(trajectories[sample.trajectory_index]):
                sample.weight = 0.0
        return samples

    def _is_filtered(self, trajectory: Trajectory) -> bool:
        return self.config.overlong_filtering and trajectory.outcome is Outcome.OVERLONG

    def _penalize(self, group: TrajectoryGroup) -> TrajectoryGroup:
        limit, buffer = self.config.max_length or 0, self.config.length_buffer
        rewarded = [
            trajectory.model_copy(
                update={
                    "reward": trajectory.reward
                    - compute_overlong_penalty(count_sampled_tokens(trajectory), limit, buffer)
                }
            )
            for trajectory in group.trajectories
        ]
        return TrajectoryGroup.model_construct(group_id=group.group_id, trajectories=rewarded)


def count_sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.tokens.token_ids) for turn in trajectory.turns if turn.tokens is not None and turn.is_trained)


def compute_overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Returns the penalty for an answer's length, in [0, 1].

    Example: max_length 10, buffer 4: length 6 -> 0, 7 -> 0.25, 10 -> 1, 50 -> 1.
    """
    return min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
