"""Which groups an epoch trains on: pure rules over groups, epoch and settings.

Order: groups without signal go first, in or out of a curriculum; then the share of the curriculum, easiest (or
hardest) first; then the share of trajectories kept in each group.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from reinforge.config.schema import CurriculumLearningConfig
from reinforge.types.trajectory import TrajectoryGroup

ZERO_VARIANCE = 1e-9
"""Rewards that differ by less are equal; float noise of a weighted sum is no signal."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What SELECT kept and why the rest went.

    Attributes:
        kept: The groups to train on.
        zero_variance: Groups whose rewards are all equal.
        low_spread: Groups whose rewards differ by less than `min_reward_diff`.
        untrainable: Groups in which no turn has token ids.
        not_taken: Groups of which the algorithm takes nothing, for instance since no reward is high enough.
        outside: Groups outside the curriculum's share.
        too_little: Why the algorithm would train on too little of what was kept; None: it would not.
    """

    kept: list[TrajectoryGroup] = field(default_factory=list)
    zero_variance: list[TrajectoryGroup] = field(default_factory=list)
    low_spread: list[TrajectoryGroup] = field(default_factory=list)
    untrainable: list[TrajectoryGroup] = field(default_factory=list)
    not_taken: list[TrajectoryGroup] = field(default_factory=list)
    outside: list[TrajectoryGroup] = field(default_factory=list)
    too_little: str | None = None

    @property
    def num_dropped(self) -> int:
        """Groups that are not trained."""
        dropped = (self.zero_variance, self.low_spread, self.untrainable, self.not_taken, self.outside)
        return sum(map(len, dropped))


def with_signal(
    groups: Sequence[TrajectoryGroup],
    min_reward_diff: float,
    compares: bool,
    teaches: Callable[[TrajectoryGroup], bool] | None = None,
) -> Selection:
    """Splits groups into those that can teach and those that cannot.

    Args:
        groups: Every group of the epoch.
        min_reward_diff: Smallest spread of rewards that counts as signal, in the unit of the reward.
        compares: True if the algorithm compares siblings; else equal and close rewards are as good as others.
        teaches: Whether the algorithm takes anything of a group; None: it does.
    """
    selection = Selection()
    for group in groups:
        given = any(trajectory.pairs for trajectory in group.trajectories)  # compared already, whatever the rewards
        if not given and not any(trajectory.is_trainable for trajectory in group.trajectories):
            selection.untrainable.append(group)
        elif not given and compares and group.reward_range <= ZERO_VARIANCE:
            selection.zero_variance.append(group)
        elif not given and compares and group.reward_range < min_reward_diff - ZERO_VARIANCE:
            selection.low_spread.append(group)
        elif teaches is not None and not teaches(group):
            selection.not_taken.append(group)
        else:
            selection.kept.append(group)
    return selection


def percentile_at(config: CurriculumLearningConfig, epoch: int) -> float:
    """Returns the share of groups that the curriculum includes at an epoch, from 0.

    The first epoch uses the initial share; each full interval after it adds one increment, up to 1.

    Example: initial 0.3, increment 0.2, interval 5: epochs 0-4 -> 0.3, 5-9 -> 0.5, 10-14 -> 0.7, 15-19 -> 0.9.
    """
    share = config.initial_percentile + config.increment_percentile * (epoch // config.expansion_interval)
    return min(1.0, round(share, 9))


def within_curriculum(
    groups: Sequence[TrajectoryGroup], share: float, *, hardest_first: bool, num_spared: int = 0
) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Returns (included, outside): the first `share` of the groups by mean reward, at least one.

    Args:
        groups: Groups with signal.
        share: In (0, 1].
        hardest_first: Lowest mean reward first (`sort_ascending`).
        num_spared: Groups that were not collected since they would be outside; the share is of them too.
    """
    ordered = sorted(groups, key=lambda group: group.mean_reward, reverse=not hardest_first)
    count = _num_included(share, len(ordered) + num_spared)
    return ordered[:count], ordered[count:]


def outside_curriculum(
    ids: Sequence[str], mean_rewards: Mapping[str, float], share: float, *, hardest_first: bool
) -> set[str]:
    """Returns the examples whose group would be outside, going by what their last group was worth.

    Example: share 0.5, easiest first, {"a": 0.9, "b": 0.2, "c": 0.5}: of a, b, c, d the curriculum includes a and c;
    b is outside; d is unknown and so never outside.

    Args:
        ids: The examples of an epoch.
        mean_rewards: Mean reward of each example's last group, if that group carried signal.
        share: In (0, 1].
        hardest_first: Lowest mean reward first (`sort_ascending`).
    """
    known = sorted((id_ for id_ in ids if id_ in mean_rewards), key=mean_rewards.__getitem__, reverse=not hardest_first)
    return set(known[_num_included(share, len(known)) :])


@dataclass(slots=True)
class Sparing:
    """Which examples `collect_only_included` saves, going by what was collected before.

    Attributes:
        config: The curriculum; None or without the option: nothing is ever spared.
        mean_rewards: Mean reward of each example's last group, if that group carried signal.
        spared: The examples of this epoch that are not collected.
    """

    config: CurriculumLearningConfig | None = None
    mean_rewards: dict[str, float] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)

    def begin(self, ids: Sequence[str], epoch: int) -> list[str]:
        """Returns the examples of an epoch to collect, and remembers the others as spared."""
        self.spared = self.outside(ids, epoch)
        return [id_ for id_ in ids if id_ not in self.spared]

    def outside(self, ids: Sequence[str], epoch: int) -> set[str]:
        """Returns those of the examples whose group would be outside the epoch's share."""
        config = self.config
        if config is None or not config.enabled or not config.collect_only_included:
            return set()
        share = percentile_at(config, epoch)
        return outside_curriculum(ids, self.mean_rewards, share, hardest_first=config.sort_ascending)

    def learn(self, groups: Sequence[TrajectoryGroup], with_signal: Sequence[TrajectoryGroup]) -> None:
        """Remembers what groups were worth; those without signal say nothing of how hard their example is."""
        for group in groups:
            self.mean_rewards.pop(group.group_id, None)
        self.mean_rewards.update({group.group_id: group.mean_reward for group in with_signal})


def _num_included(share: float, total: int) -> int:
    return max(1, math.ceil(share * total - 1e-9)) if total else 0


def subsample(group: TrajectoryGroup, share: float, rng: random.Random) -> TrajectoryGroup:
    """Returns the group with a random `share` of its trajectories, at least two, in their order."""
    count = min(len(group.trajectories), max(2, round(share * len(group.trajectories))))
    kept = sorted(rng.sample(range(len(group.trajectories)), count))
    return TrajectoryGroup.model_construct(
        group_id=group.group_id, trajectories=[group.trajectories[index] for index in kept]
    )
