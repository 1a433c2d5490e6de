"""What DPO and IPO share: pairs of siblings, one preferred by its reward.

rewards [0, 1, 0.5]:  best_worst -> (1, 0);  all -> (1, 0), (1, 2), (2, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from reinforge.algorithms.curriculum import ZERO_VARIANCE
from reinforge.algorithms.samples import on_mask, to_samples, without_duplicates
from reinforge.config.schema import AlgorithmConfig
from reinforge.errors import TrajectoryError
from reinforge.interfaces import Algorithm, Needs
from reinforge.types.sample import FloatArray, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class PreferenceConfig(AlgorithmConfig):
    """How pairs are made of groups."""

    pairs: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="Pairs of a group: its best against its worst, or every two; all of 8 siblings are up to 28 pairs.",
    )
    min_margin: float = Field(default=0.0, ge=0, description="Least difference of reward within a pair.")
    drop_duplicates: bool = Field(
        default=False, description="Pairs of one agent of which both replies are equal to the token are trained once."
    )
    beta: float = Field(
        default=0.1, gt=0, description="Strength of the pull to the reference; 0.01 to 0.5 is usual for sums of tokens."
    )
    length_normalised: bool = Field(
        default=False, description="Compare means over tokens instead of sums; beta then wants 2 to 10."
    )


class Preference(Algorithm):
    """Prefers one sibling to another; credit is 1 and -1, the direction that each is to move in.

    Args:
        config: The settings.
    """

    config: PreferenceConfig
    needs = Needs(ref_logprobs=True)
    needs_groups = True
    offline = True

    def __init__(self, config: PreferenceConfig):
        self.config = config

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False where no two siblings are far enough apart, and no pairs are given."""
        return bool(self.pairs_of(group)) or any(trajectory.pairs for trajectory in group.trajectories)

    def pairs_of(self, group: TrajectoryGroup) -> list[tuple[Trajectory, Trajectory]]:
        """Returns the (preferred, other) siblings of each pair, of those that carry loss."""
        siblings = [trajectory for trajectory in group.trajectories if trajectory.is_trainable]
        rewards = [trajectory.reward for trajectory in siblings]
        pairs = make_pairs(rewards, self.config.pairs, self.config.min_margin)
        return [(siblings[chosen], siblings[other]) for chosen, other in pairs]

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns two samples a pair, which share their `pair_id`.

        Raises:
            TrajectoryError: The two of a pair do not answer the same prompt, or one is not a single row of tokens.
        """
        samples: list[TrainingSample] = []
        first = 0
        for group in groups:
            rows = {i: to_samples(trajectory) for i, trajectory in enumerate(group.trajectories)}
            trained = [i for i in rows if rows[i]]
            rewards = [group.rewards[i] for i in trained]
            for pair in make_pairs(rewards, self.config.pairs, self.config.min_margin):
                chosen, rejected = (trained[i] for i in pair)
                found = [
                    replace(
                        row, group_id=group.group_id, group_rewards=tuple(group.rewards), trajectory_index=first + i
                    )
                    for i in (chosen, rejected)
                    for row in rows[i]
                ]
                _refuse_unlike(found, group.group_id)
                for sample in found:
                    sample.pair_id = f"{first + chosen}>{first + rejected}"
                samples += found
            first += len(group.trajectories)
        return without_duplicates(samples) if self.config.drop_duplicates else samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns 1 on the tokens of the preferred sample of each pair, -1 on those of the other."""
        best: dict[str | None, float] = {}
        for sample in samples:
            best[sample.pair_id] = max(sample.reward, best.get(sample.pair_id, sample.reward))
        return [on_mask(sample, 1.0 if sample.reward == best[sample.pair_id] else -1.0) for sample in samples]


def make_pairs(rewards: Sequence[float], which: str = "best_worst", min_margin: float = 0.0) -> list[tuple[int, int]]:
    """Returns the indices (preferred, other) of each pair; equal rewards make none.

    Example: rewards [0, 1, 0.5]: best_worst -> [(1, 0)]; all -> [(1, 0), (1, 2), (2, 0)]; min_margin 1 -> [(1, 0)].

    Args:
        rewards: Of the siblings.
        which: `best_worst` or `all`.
        min_margin: Least difference of rewards.
    """
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    found = [(i, j) for i in order for j in range(len(rewards)) if rewards[i] - rewards[j] > ZERO_VARIANCE]
    if which == "best_worst":
        worst = min(rewards, default=0.0)
        found = [(i, j) for i, j in found if i == order[0] and rewards[j] == worst][:1]
    return [(i, j) for i, j in found if rewards[i] - rewards[j] >= min_margin - ZERO_VARIANCE]


def _refuse_unlike(found: Sequence[TrainingSample], group_id: str) -> None:
    """Raises unless these are two samples that answer the same prompt."""
    if len(found) != 2:
        raise TrajectoryError(
            f"group {group_id}: a preference compares one row of tokens with another, and the trajectories of a pair "
            f"are {len(found)} rows, since a history was rewritten between turns; keep earlier turns as they were, or "
            "use another algorithm"
        )
    a, b = (sample.token_ids[: int(sample.loss_mask.argmax())].tolist() for sample in found)
    if a != b:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise TrajectoryError(
            f"group {group_id}: the trajectories of a pair answer different prompts, of {len(a)} and {len(b)} tokens "
            f"of which the first {same} are the same; siblings whose first prompt depends on chance cannot be paired: "
            "give them the same start, or use another algorithm"
        )
