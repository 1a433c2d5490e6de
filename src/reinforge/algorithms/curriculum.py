"""Chooses the groups that an epoch trains on: pure functions of groups, epoch and settings.

Groups without signal are dropped first, with or without a curriculum. Then the curriculum keeps its share of the
groups, easiest (or hardest) first, and each group keeps a share of its trajectories.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any

from reinforge.config.schema import CurriculumLearningConfig, LevelsConfig
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.trajectory import TrajectoryGroup

ZERO_VARIANCE = 1e-9  # rewards that differ by less count as equal: rounding in a weighted sum is not signal


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups that SELECT kept, and the dropped ones by reason."""

    kept: list[TrajectoryGroup] = field(default_factory=list)
    zero_variance: list[TrajectoryGroup] = field(default_factory=list)  # all rewards are equal
    low_spread: list[TrajectoryGroup] = field(default_factory=list)  # rewards differ by less than min_reward_diff
    untrainable: list[TrajectoryGroup] = field(default_factory=list)  # no turn has token ids
    unused: list[TrajectoryGroup] = field(default_factory=list)  # the algorithm finds no signal
    outside: list[TrajectoryGroup] = field(default_factory=list)  # of the curriculum's share
    skip_reason: str | None = None  # why the algorithm skips the kept groups, as there is too little in them


def split_by_signal(
    groups: Sequence[TrajectoryGroup],
    min_reward_diff: float,
    needs_groups: bool,
    has_signal: Callable[[TrajectoryGroup], bool] | None = None,
    *,
    needs_tokens: bool = True,
) -> Selection:
    """Returns the groups with signal, and those without by reason.

    Equal rewards, or a spread below `min_reward_diff`, carry no signal if the algorithm compares siblings
    (`needs_groups`); `has_signal` is the algorithm's own test. Without `needs_tokens`, groups of plain messages count.
    """
    selection = Selection()
    for group in groups:
        has_pairs = any(trajectory.pairs for trajectory in group.trajectories)  # ranked already, whatever the rewards
        if needs_tokens and not has_pairs and not any(trajectory.is_trainable for trajectory in group.trajectories):
            selection.untrainable.append(group)
        elif not has_pairs and needs_groups and group.reward_range <= ZERO_VARIANCE:
            selection.zero_variance.append(group)
        elif not has_pairs and needs_groups and group.reward_range < min_reward_diff - ZERO_VARIANCE:
            selection.low_spread.append(group)
        elif has_signal is not None and not has_signal(group):
            selection.unused.append(group)
        else:
            selection.kept.append(group)
    return selection


def compute_included_share(config: CurriculumLearningConfig, epoch: int) -> float:
    """Returns the share of groups that the curriculum includes in an epoch (counted from 0).

    The first epoch uses the initial share; each full interval adds one increment, up to 1.

    Example: initial 0.3, increment 0.2, interval 5: epochs 0-4 -> 0.3, 5-9 -> 0.5, 10-14 -> 0.7, 15-19 -> 0.9.
    """
    share = config.initial_percentile + config.increment_percentile * (epoch // config.expansion_interval)
    return min(1.0, round(share, 9))


def split_by_share(
    groups: Sequence[TrajectoryGroup], share: float, *, hardest_first: bool, num_skipped: int = 0
) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Returns (included, outside): the first `share` of the groups by mean reward, at least one.

    `num_skipped` groups were not collected because they would be outside; they count toward the total.
    """
    ordered = sorted(groups, key=lambda group: group.mean_reward, reverse=not hardest_first)
    count = _num_included(share, len(ordered) + num_skipped)
    return ordered[:count], ordered[count:]


def find_excluded(
    ids: Sequence[str], mean_rewards: Mapping[str, float], share: float, *, hardest_first: bool
) -> set[str]:
    """Returns the examples whose group would be outside the share, judged by their last group's mean reward.

    Example: share 0.5, easiest first, {"a": 0.9, "b": 0.2, "c": 0.5}: of a, b, c, d the curriculum includes a and c;
    b is outside; d has no reward yet, so it is never outside.
    """
    known = sorted((id_ for id_ in ids if id_ in mean_rewards), key=mean_rewards.__getitem__, reverse=not hardest_first)
    return set(known[_num_included(share, len(known)) :])


@dataclass(slots=True)
class ExampleFilter:
    """Skips examples that the curriculum would exclude anyway (`collect_only_included`)."""

    config: CurriculumLearningConfig | None = None
    mean_rewards: dict[str, float] = field(default_factory=dict)  # of examples whose last group had signal
    skipped: set[str] = field(default_factory=set)  # what this epoch does not collect; the loop sets it

    def find_skipped(self, ids: Sequence[str], epoch: int) -> set[str]:
        config = self.config
        if config is None or not config.enabled or not config.collect_only_included:
            return set()
        share = compute_included_share(config, epoch)
        return find_excluded(ids, self.mean_rewards, share, hardest_first=config.sort_ascending)

    def record_rewards(self, groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]) -> None:
        """Records the mean rewards of the kept groups and forgets the others', which do not tell how hard they are."""
        for group in groups:
            self.mean_rewards.pop(group.group_id, None)
        self.mean_rewards.update({group.group_id: group.mean_reward for group in kept})


@dataclass(slots=True)
class Levels:
    """The highest level of which examples are collected; it rises once their mean reward reaches the threshold.

    Example: threshold 0.7, window 2: after epochs with the mean rewards 0.5, 0.8 and 0.7 of the examples of level 0,
    level 1 is added, since (0.8 + 0.7) / 2 >= 0.7. From then on the examples of level 1 decide.
    """

    config: LevelsConfig
    by_example: Mapping[str, int]  # of the training examples that have one; the others are always collected
    highest: int = field(init=False)
    rewards: list[float] = field(default_factory=list)  # of the last epochs since it rose, their mean at that level

    def __post_init__(self) -> None:
        self.highest = min(self.by_example.values())

    def includes(self, example: str) -> bool:
        return self.by_example.get(example, self.highest) <= self.highest

    def record_rewards(self, rewards: Iterable[tuple[str, float]]) -> bool:
        """Adds the mean rewards of an epoch's examples; returns True if the level rises."""
        found = [reward for example, reward in rewards if self.by_example.get(example) == self.highest]
        higher = [level for level in self.by_example.values() if level > self.highest]
        if not found or not higher:
            return False
        self.rewards = [*self.rewards, fmean(found)][-self.config.window :]
        if len(self.rewards) < self.config.window or fmean(self.rewards) < self.config.threshold - ZERO_VARIANCE:
            return False
        self.highest, self.rewards = min(higher), []
        return True

    def as_dict(self) -> dict[str, Any]:
        return {"level": self.highest, "level_rewards": self.rewards}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.highest, self.rewards = state["level"], list(state["level_rewards"])


def find_levels(items: Iterable[EvalInputItem]) -> dict[str, int]:
    levels = {str(item.id): (item.full_dataset_entry or {}).get("level") for item in items}
    return {example: level for example, level in levels.items() if type(level) is int}


def _num_included(share: float, total: int) -> int:
    return max(1, math.ceil(share * total - 1e-9)) if total else 0


def subsample(group: TrajectoryGroup, share: float, rng: random.Random | None = None) -> TrajectoryGroup:
    """Returns the group with a `share` of its trajectories, at least two, in their original order.

    Without `rng` those whose rewards have the largest variance (PODS, arXiv:2504.13818): lowest ones and highest ones.

    Example: rewards 0, 0.5, 0.4, 1 and a share of a half -> those with 0 and 1.
    """
    count = min(len(group.trajectories), max(2, round(share * len(group.trajectories))))
    if rng is not None:
        kept = sorted(rng.sample(range(len(group.trajectories)), count))
    else:
        rewards = group.rewards
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        choices = [order[:low] + order[len(order) - count + low :] for low in range(count + 1)]
        kept = sorted(max(choices, key=lambda chosen: pvariance([rewards[index] for index in chosen])))
    return TrajectoryGroup.model_construct(
        group_id=group.group_id, trajectories=[group.trajectories[index] for index in kept]
    )
