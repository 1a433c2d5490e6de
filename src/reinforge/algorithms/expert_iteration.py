"""Expert iteration: repeated supervised fine-tuning on the policy's own good episodes (arXiv:1705.08439).

`threshold` keeps every trajectory that reaches a reward (for language models arXiv:2403.04642), which is rejection
sampling with a minimum reward. `weighted_sampling` samples trajectories of each agent with probabilities that grow with
the reward:

    w_i = max(r_i, minimum) - minimum, p_i ~ w_i / sum_j w_j + epsilon / n; the default minimum is the lowest r
    rewards 0, 1, 3, epsilon 0.01  ->  w / sum 0, 1/4, 3/4  ->  p ~ 0.0033, 0.2533, 0.7533, over 1.01

Differs from the paper: there is no search; the selection is the expert. If all rewards are equal, so are the
probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reinforge.algorithms.rejection_sampling import DropDuplicates, ImitationConfig, RejectionSampling
from reinforge.algorithms.samples import drop_duplicate_samples, samples_from_groups
from reinforge.interfaces import Builder
from reinforge.registry import register_algorithm
from reinforge.types.sample import TrainingSample
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class ExpertIterationConfig(ImitationConfig, name="expert_iteration"):
    """Settings of expert iteration; the default keeps every solved episode."""

    rollout_selection_method: Literal["threshold", "weighted_sampling"] = Field(
        default="threshold", description="Keep trajectories that reach reward_threshold, or sample them by reward."
    )
    reward_threshold: float = Field(default=0.9, description="threshold: minimum reward to keep a trajectory.")
    weighting_sample_size_factor: float = Field(
        default=0.5, gt=0, description="weighted_sampling: samples per agent, as a share of its trajectories."
    )
    weighting_minimum: float | None = Field(
        default=None, description="weighted_sampling: lower rewards count as this one; null: the agent's lowest."
    )
    weighting_use_replacement: bool = Field(
        default=True,
        description="weighted_sampling: a trajectory can be sampled several times and then counts as often.",
    )
    weighting_epsilon: float = Field(
        default=0.01, ge=0, description="weighted_sampling: uniform share, added to weights that sum to 1."
    )
    min_examples: int = Field(
        default=1, ge=1, description="Skip an epoch that would train on fewer trajectories than this."
    )
    drop_duplicates: DropDuplicates = True


class ExpertIteration(RejectionSampling):
    """Imitates the selected trajectories; each counts once, or as often as it was sampled."""

    config: ExpertIterationConfig

    def __init__(self, config: ExpertIterationConfig | None = None, seed: int = 0):
        super().__init__()
        self.config, self.seed = config or ExpertIterationConfig(), seed
        self.best_k, self.min_reward, self.needs_groups = None, self.config.reward_threshold, False

    @property
    def is_weighted(self) -> bool:
        return self.config.rollout_selection_method == "weighted_sampling"

    def has_signal(self, group: TrajectoryGroup) -> bool:
        return self.is_weighted or super().has_signal(group)

    def skip_reason(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        minimum = self.config.min_examples
        if not self.is_weighted:
            count = sum(len(self.select_trajectories(group.trajectories)) for group in groups)
            message = f"{count} trajectories reach reward_threshold, but min_examples is {minimum}"
            return message if count < minimum else None
        sampled = self.sample_trajectories(groups)
        for agent, (wanted, counts) in sampled.items():
            if counts.total() < wanted:
                available = f"{counts.total()} trajectories{f' of {agent}' if agent else ''} can be sampled"
                return f"{available}, but weighting_sample_size_factor requires {wanted}"
        count = sum(len(counts) for _, counts in sampled.values())
        return (
            f"{count} different trajectories were sampled, but min_examples is {minimum}" if count < minimum else None
        )

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of the selected trajectories, weighted by how often each was sampled."""
        if not self.is_weighted:
            return super().build_samples(groups)
        counts: Counter[int] = sum((each for _, each in self.sample_trajectories(groups).values()), Counter())
        samples = [sample for sample in samples_from_groups(groups) if counts[sample.trajectory_index]]
        for sample in samples:
            sample.weight *= counts[sample.trajectory_index]
        return drop_duplicate_samples(samples, add_up=True) if self.config.drop_duplicates else samples

    def sample_trajectories(self, groups: Sequence[TrajectoryGroup]) -> dict[str, tuple[int, Counter[int]]]:
        """Returns for each agent the wanted number of samples, and how often each trajectory was sampled, by index.

        The same episodes give the same samples in every process.
        """
        by_agent: dict[str, list[tuple[int, Trajectory]]] = {}
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        for index, trajectory in enumerate(trajectories):
            if trajectory.is_trainable:
                by_agent.setdefault(trajectory.agent or "", []).append((index, trajectory))
        return {agent: self._sample_of_agent(agent, candidates) for agent, candidates in by_agent.items()}

    def _sample_of_agent(self, agent: str, candidates: Sequence[tuple[int, Trajectory]]) -> tuple[int, Counter[int]]:
        settings = self.config
        wanted = round(len(candidates) * settings.weighting_sample_size_factor)
        probabilities = compute_sampling_probabilities(
            [trajectory.reward for _, trajectory in candidates], settings.weighting_minimum, settings.weighting_epsilon
        )
        episodes = [str(trajectory.episode_id) for _, trajectory in candidates]
        rng = np.random.default_rng(stable_seed(self.seed, "weighted_sampling", agent, *episodes))
        size = wanted
        if not settings.weighting_use_replacement:
            size = min(wanted, int(np.count_nonzero(probabilities)))
        sampled = rng.choice(len(candidates), size=size, replace=settings.weighting_use_replacement, p=probabilities)
        return wanted, Counter(candidates[place][0] for place in sorted(sampled.tolist()))


def compute_sampling_probabilities(
    rewards: Sequence[float], minimum: float | None, epsilon: float
) -> NDArray[np.float64]:
    """Returns the probability of sampling each trajectory; uniform if no reward is above the minimum.

    Example: rewards 0, 1, 3, epsilon 0 -> 0, 0.25, 0.75; minimum 1 -> 0, 0, 1; rewards 2, 2 -> 0.5, 0.5.
    """
    values = np.asarray(rewards, np.float64)
    floor = values.min() if minimum is None else minimum
    weights = np.maximum(values, floor) - floor
    if weights.sum() == 0:
        weights = np.ones_like(values)
    weights = weights / weights.sum() + epsilon / len(values)
    return np.asarray(weights / weights.sum())


@register_algorithm(config_type=ExpertIterationConfig)
async def expert_iteration(config: ExpertIterationConfig, builder: Builder) -> AsyncIterator[ExpertIteration]:
    yield ExpertIteration(config, builder.config.finetuning.seed)
