"""Expert iteration: supervised fine-tuning on the policy's own good episodes, again and again (arXiv:1705.08439).

`threshold` keeps every trajectory that reaches a reward (for language models arXiv:2403.04642), which is rejection
sampling with a least reward. `weighted_sampling` draws trajectories of each agent, the better the likelier:

    w_i = max(r_i, minimum) - minimum, p_i ~ w_i / sum_j w_j + epsilon / n; the minimum is the least r unless given
    rewards 0, 1, 3, epsilon 0.01  ->  w / sum 0, 1/4, 3/4  ->  p ~ 0.0033, 0.2533, 0.7533, over 1.01

Differs from the paper: there is no search; the expert is the selection. Equal rewards are drawn alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reinforge.algorithms.rejection_sampling import DropDuplicates, ImitationConfig, RejectionSampling
from reinforge.algorithms.samples import samples_of_groups, without_duplicates
from reinforge.registry import register_algorithm
from reinforge.types.sample import TrainingSample
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class ExpertIterationConfig(ImitationConfig, name="expert_iteration"):
    """Settings of expert iteration: everything that was solved."""

    rollout_selection_method: Literal["threshold", "weighted_sampling"] = Field(
        default="threshold", description="Keep what reaches reward_threshold, or draw by reward."
    )
    reward_threshold: float = Field(default=0.9, description="threshold: least reward of what is kept.")
    weighting_sample_size_factor: float = Field(
        default=0.5, gt=0, description="weighted_sampling: draws of an agent, as a share of its trajectories."
    )
    weighting_minimum: float | None = Field(
        default=None, description="weighted_sampling: lower rewards count as this one; null: the agent's least."
    )
    weighting_use_replacement: bool = Field(
        default=True, description="weighted_sampling: a trajectory may be drawn again and then counts as often."
    )
    weighting_epsilon: float = Field(
        default=0.01, ge=0, description="weighted_sampling: share drawn alike, added to weights of sum 1."
    )
    min_examples: int = Field(
        default=1, ge=1, description="An epoch of which fewer trajectories would be trained on trains nothing."
    )
    drop_duplicates: DropDuplicates = True


class ExpertIteration(RejectionSampling):
    """What is selected is imitated; every token counts one, or as often as it was drawn.

    Args:
        config: The settings.
        seed: The run's.
    """

    config: ExpertIterationConfig

    def __init__(self, config: ExpertIterationConfig | None = None, seed: int = 0):
        super().__init__()
        self.config, self.seed = config or ExpertIterationConfig(), seed
        self.best_k, self.min_reward, self.needs_groups = None, self.config.reward_threshold, False

    @property
    def draws(self) -> bool:
        """True if trajectories are drawn by their rewards."""
        return self.config.rollout_selection_method == "weighted_sampling"

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False where nothing is good enough; of what is drawn from, anything may be."""
        return self.draws or super().teaches(group)

    def too_little(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Returns why too few trajectories would be trained on."""
        least = self.config.min_examples
        if not self.draws:
            count = sum(len(self.keep(group.trajectories)) for group in groups)
            return f"{count} trajectories are good enough, min_examples asks for {least}" if count < least else None
        drawn = self.draw(groups)
        for agent, (asked, found) in drawn.items():
            if found.total() < asked:
                can = f"{found.total()} trajectories{f' of {agent}' if agent else ''} can be drawn"
                return f"{can}, weighting_sample_size_factor asks for {asked}"
        count = sum(len(found) for _, found in drawn.values())
        return f"{count} different trajectories are drawn, min_examples asks for {least}" if count < least else None

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of what is kept, or of what is drawn, weighing as often as it was."""
        if not self.draws:
            return super().build_samples(groups)
        counts: Counter[int] = sum((found for _, found in self.draw(groups).values()), Counter())
        samples = [sample for sample in samples_of_groups(groups) if counts[sample.trajectory_index]]
        for sample in samples:
            sample.weight *= counts[sample.trajectory_index]
        return without_duplicates(samples, add_up=True) if self.config.drop_duplicates else samples

    def draw(self, groups: Sequence[TrajectoryGroup]) -> dict[str, tuple[int, Counter[int]]]:
        """Returns for each agent how many draws were asked for, and how often each trajectory was drawn by its index.

        The same episodes give the same draws in every process.
        """
        by_agent: dict[str, list[tuple[int, Trajectory]]] = {}
        everything = [trajectory for group in groups for trajectory in group.trajectories]
        for index, trajectory in enumerate(everything):
            if trajectory.is_trainable:
                by_agent.setdefault(trajectory.agent or "", []).append((index, trajectory))
        return {agent: self._draw_of(agent, found) for agent, found in by_agent.items()}

    def _draw_of(self, agent: str, found: Sequence[tuple[int, Trajectory]]) -> tuple[int, Counter[int]]:
        settings = self.config
        asked = round(len(found) * settings.weighting_sample_size_factor)
        probabilities = draw_probabilities(
            [trajectory.reward for _, trajectory in found], settings.weighting_minimum, settings.weighting_epsilon
        )
        episodes = [str(trajectory.episode_id) for _, trajectory in found]
        rng = np.random.default_rng(stable_seed(self.seed, "weighted_sampling", agent, *episodes))
        size = asked
        if not settings.weighting_use_replacement:
            size = min(asked, int(np.count_nonzero(probabilities)))
        drawn = rng.choice(len(found), size=size, replace=settings.weighting_use_replacement, p=probabilities)
        return asked, Counter(found[place][0] for place in sorted(drawn.tolist()))


def draw_probabilities(rewards: Sequence[float], minimum: float | None, epsilon: float) -> NDArray[np.float64]:
    """Returns with which probability each reward is drawn; where none is above the minimum, all alike.

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
async def expert_iteration(config: ExpertIterationConfig, builder: Any) -> AsyncIterator[ExpertIteration]:
    """Yields expert iteration."""
    yield ExpertIteration(config, builder.config.finetuning.seed)
