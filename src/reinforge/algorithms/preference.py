"""Shared parts of DPO, IPO, ORPO and SimPO: pairs of siblings, one preferred by its reward.

rewards [0, 1, 0.5]:  best_worst -> (1, 0);  all -> (1, 0), (1, 2), (2, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from reinforge.algorithms.curriculum import ZERO_VARIANCE
from reinforge.algorithms.samples import drop_duplicate_samples, fill_trained_tokens, samples_from_trajectory
from reinforge.config.schema import AlgorithmConfig
from reinforge.errors import TrajectoryError
from reinforge.interfaces import Algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup


class PairConfig(AlgorithmConfig):
    """How groups become preference pairs."""

    pairs: Literal["best_worst", "all"] = Field(
        default="best_worst",
        description="Pairs of a group: its best and its worst sibling, or every two; 8 siblings make up to 28 pairs.",
    )
    min_margin: float = Field(default=0.0, ge=0, description="Minimum reward difference within a pair.")
    drop_duplicates: bool = Field(
        default=False, description="Train identical pairs of an agent (equal to the token) only once."
    )


class PreferenceConfig(PairConfig):
    """Pairs, and how the policy is compared with the reference on them."""

    beta: float = Field(
        default=0.1,
        gt=0,
        description="Strength of the pull toward the reference model; 0.01 to 0.5 is usual with sums over tokens.",
    )
    length_normalized: bool = Field(
        default=False, description="Compare means over tokens instead of sums; use beta 2 to 10 then."
    )


class Preference(Algorithm):
    """Prefers one sibling to another; the advantage is 1 for the preferred sample and -1 for the other.

    Subclasses set `config_type`, the loss's name and its settings.
    """

    config_type: ClassVar[type[PairConfig]]
    loss_name: ClassVar[str]
    loss_settings: ClassVar[tuple[str, ...]]
    config: PairConfig
    needs = Needs(ref_logprobs=True)
    needs_groups = True
    offline = True

    def __init__(self, config: PairConfig | None = None):
        self.config = config or self.config_type()
        self.loss = LossSpec(self.loss_name, {name: getattr(self.config, name) for name in self.loss_settings})

    def has_signal(self, group: TrajectoryGroup) -> bool:
        """Returns False if no two rewards are far enough apart and the data brings no pairs."""
        return bool(self.select_pairs(group)) or any(trajectory.pairs for trajectory in group.trajectories)

    def select_pairs(self, group: TrajectoryGroup) -> list[tuple[Trajectory, Trajectory]]:
        siblings = [trajectory for trajectory in group.trajectories if trajectory.is_trainable]
        rewards = [trajectory.reward for trajectory in siblings]
        pairs = make_pairs(rewards, self.config.pairs, self.config.min_margin)
        return [(siblings[chosen], siblings[other]) for chosen, other in pairs]

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns two samples per pair, which share their `pair_id` and answer the same prompt.

        A trajectory of several samples is in no pair.

        Raises:
            TrajectoryError: No pair is left for that reason, or the samples of a pair answer different prompts.
        """
        samples: list[TrainingSample] = []
        first = 0
        rewritten = ""
        for group in groups:
            rows = {i: samples_from_trajectory(trajectory) for i, trajectory in enumerate(group.trajectories)}
            trained = [i for i in rows if len(rows[i]) == 1]
            if any(len(each) > 1 for each in rows.values()):
                rewritten = rewritten or group.group_id
            rewards = [group.rewards[i] for i in trained]
            for pair in make_pairs(rewards, self.config.pairs, self.config.min_margin):
                chosen, rejected = (trained[i] for i in pair)
                id_, all_rewards = group.group_id, tuple(group.rewards)
                pair_samples = [
                    replace(rows[i][0], group_id=id_, group_rewards=all_rewards, trajectory_index=first + i)
                    for i in (chosen, rejected)
                ]
                _require_same_prompt(pair_samples, group.group_id)
                for sample in pair_samples:
                    sample.pair_id = f"{first + chosen}>{first + rejected}"
                samples += pair_samples
            first += len(group.trajectories)
        if rewritten and not samples:
            raise TrajectoryError(
                f"group {rewritten}: a preference pair needs one sample per trajectory, but there are several, because "
                "the agent rewrites its history between turns; keep earlier turns unchanged, or use another algorithm"
            )
        return drop_duplicate_samples(samples) if self.config.drop_duplicates else samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns 1 on the trained tokens of each pair's preferred sample, -1 on those of the other."""
        return [
            fill_trained_tokens(sample, 1.0 if is_preferred else -1.0)
            for sample, is_preferred in zip(samples, find_preferred(samples), strict=True)
        ]


class ReferenceFreePreference(Preference):
    """Compares the mean log-probs of the pair's replies and needs no reference model."""

    needs = Needs()

    @property
    def rejected_credit(self) -> float:
        """The other sample's total credit; that of the preferred one is 1."""
        return -1.0

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns each sample's credit, divided equally among its trained tokens."""
        return [
            fill_trained_tokens(sample, (1.0 if is_preferred else self.rejected_credit) / sample.num_trained)
            for sample, is_preferred in zip(samples, find_preferred(samples), strict=True)
        ]


def find_preferred(samples: Sequence[TrainingSample]) -> list[bool]:
    best: dict[str | None, float] = {}
    for sample in samples:
        best[sample.pair_id] = max(sample.reward, best.get(sample.pair_id, sample.reward))
    return [sample.reward == best[sample.pair_id] for sample in samples]


def make_pairs(rewards: Sequence[float], which: str = "best_worst", min_margin: float = 0.0) -> list[tuple[int, int]]:
    """Returns the indices (preferred, other) of each pair; equal rewards make no pair.

    Example: rewards [0, 1, 0.5]: best_worst -> [(1, 0)]; all -> [(1, 0), (1, 2), (2, 0)]; min_margin 1 -> [(1, 0)].
    """
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    pairs = [(i, j) for i in order for j in range(len(rewards)) if rewards[i] - rewards[j] > ZERO_VARIANCE]
    if which == "best_worst":
        worst = min(rewards, default=0.0)
        pairs = [(i, j) for i, j in pairs if i == order[0] and rewards[j] == worst][:1]
    return [(i, j) for i, j in pairs if rewards[i] - rewards[j] >= min_margin - ZERO_VARIANCE]


def _require_same_prompt(pair: Sequence[TrainingSample], group_id: str) -> None:
    a, b = (sample.token_ids[: int(sample.loss_mask.argmax())].tolist() for sample in pair)
    if a != b:
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise TrajectoryError(
            f"group {group_id}: the trajectories of a pair answer different prompts, of {len(a)} and {len(b)} tokens "
            f"with the first {same} in common; siblings with random first prompts cannot be paired: give them the same "
            "first prompt, or use another algorithm"
        )
