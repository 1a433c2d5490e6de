"""Shared parts of the group-based policy-gradient algorithms: settings, samples and advantages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from reinforge.algorithms.samples import fill_trained_tokens, samples_from_groups, weight_by_trajectory
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup


def group_relative_advantage(reward: float, group_rewards: Sequence[float], *, scale: bool = False) -> float:
    """Returns a reward minus its group's mean, divided by the group's population deviation + 1e-4 if `scale`.

    GRPO (arXiv:2402.03300, section 4.1.2) divides. Dr. GRPO (arXiv:2503.20783) does not, and shows that dividing
    favors groups that are almost always right or wrong.

    Example: `group_relative_advantage(1, [1, 0, 0, 1])` -> 0.5; scaled by the population deviation 0.5: about 1.
    """
    mean = statistics.fmean(group_rewards)
    if not scale:
        return reward - mean
    deviation = math.sqrt(statistics.fmean((other - mean) ** 2 for other in group_rewards))
    return (reward - mean) / (deviation + 1e-4)


def leave_one_out_advantage(reward: float, group_rewards: Sequence[float]) -> float:
    """Returns a reward minus the mean of the others (RLOO, arXiv:2402.14740, section 2.4).

    The mean of the others does not depend on the reward itself, so the baseline adds no bias. The result equals
    G / (G - 1) times the reward minus the mean of all G; it is 0 for a group of one.

    Example: `leave_one_out_advantage(1, [1, 0, 0, 1])` -> 1 - 1/3 = 0.667.
    """
    count = len(group_rewards)
    return (reward - statistics.fmean(group_rewards)) * count / (count - 1) if count > 1 else 0.0


def normalize_over_batch(values: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns arrays with the mean of all entries subtracted, divided by the population standard deviation of all.

    Example: [[1, 1], [0]] -> mean 2/3, deviation 0.471 -> [[0.707, 0.707], [-1.414]]; 0 if all entries are equal.
    """
    entries = np.concatenate(values).astype(np.float64) if values else np.zeros(0)
    if not len(entries):
        return list(values)
    mean, deviation = entries.mean(), entries.std()
    return [((array - mean) / (deviation + 1e-8)).astype(np.float32) for array in values]


def compute_returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Returns each turn's return: the discounted sum of its own and later rewards, sum_j discount^j r_(k+j).

    Example: rewards [1, 0, 2], discount 0.5 -> [1 + 0 + 0.5, 0 + 1, 2] = [1.5, 1, 2].
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


ClipLow = Annotated[float, Field(gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(gt=0, description="The ratio is clipped above at 1 + clip_high.")]
Scale = Annotated[bool, Field(description="Divide by the group's standard deviation.")]
TisCap = Annotated[
    float | None,
    Field(
        ge=1,
        description="Upper limit of the weight p_learner / p_sampler that a token gets where learner and sampler round "
        "differently (bfloat16) or older weights sampled it (limits.max_staleness); null: no weights.",
    ),
]
KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    Field(description="Schulman's KL estimator used in the loss; the mean gradient of k1 is zero there."),
]
Aggregation = Annotated[
    Literal["sequence", "token", "constant"],
    Field(
        description="Average over each trajectory first, over all tokens at once, or divide each sample's sum by "
        "constant_length."
    ),
]


SHARED_SETTINGS = ("tis_cap", "kl_coef", "kl_estimator", "entropy_coef")
"""Settings that every policy-gradient loss takes."""


class PolicyGradientConfig(AlgorithmConfig):
    """Settings of every policy-gradient algorithm."""

    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference model.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    tis_cap: TisCap = 2.0
    credit: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="Source of advantages: the trajectory's reward, or the shaped rewards of a token's own and later "
        "turns.",
    )
    turn_discount: float = Field(default=1.0, ge=0, le=1, description="credit turn: discount of a reward per turn.")
    add_outcome: bool = Field(
        default=True,
        description="credit turn: add the trajectory's reward to its last turn; false if shaped rewards include it.",
    )


class ClippedConfig(PolicyGradientConfig):
    """Settings of algorithms that clip the probability ratio."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Also clip the ratio here where the advantage is negative (3 is usual); null: off.",
    )
    loss_aggregation: Aggregation = "sequence"
    constant_length: int = Field(
        default=256,
        ge=1,
        description="loss_aggregation constant: divisor of each sum; about the longest reply in tokens.",
    )


class PolicyGradient(Algorithm):
    """Group-relative advantages and a policy-gradient loss.

    Subclasses set `config_type` and override `compute_advantage` (from a reward and its group's rewards), `build_loss`,
    or only the loss's name and its own settings.
    """

    config_type: ClassVar[type[PolicyGradientConfig]] = PolicyGradientConfig
    loss_name: ClassVar[str] = "clipped_pg"
    loss_settings: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    config: PolicyGradientConfig
    needs_groups = True

    def __init__(self, config: PolicyGradientConfig | None = None):
        self.config = config or self.config_type()
        self.needs = Needs(old_logprobs="inexact", ref_logprobs=self.config.kl_coef > 0)
        self.loss = self.build_loss()

    def build_loss(self) -> LossSpec:
        constant = ["constant_length"] if self.loss_aggregation == "constant" else []
        names = [*self.loss_settings, *constant, *SHARED_SETTINGS]
        return LossSpec(
            self.loss_name, {name: getattr(self.config, name) for name in names if hasattr(self.config, name)}
        )

    @property
    def loss_aggregation(self) -> str:
        return getattr(self.config, "loss_aggregation", "sequence")

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of all groups; with `loss_aggregation: sequence` all trajectories weigh the same."""
        samples = samples_from_groups(groups)
        if self.loss_aggregation == "sequence":
            weight_by_trajectory(samples)
        return samples

    def compute_advantage(self, reward: float, group_rewards: Sequence[float]) -> float:
        return group_relative_advantage(reward, group_rewards, scale=getattr(self.config, "scale_rewards", False))

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns each sample's advantages `[T]`: the same on every trained token of a trajectory, or of a turn."""
        if self.config.credit == "turn":
            return self._credit_turns(samples)
        keys = [(sample.reward, sample.group_rewards) for sample in samples]  # a trajectory may have many samples
        advantages = {key: self.compute_advantage(*key) for key in dict.fromkeys(keys)}
        return [fill_trained_tokens(sample, advantages[key]) for sample, key in zip(samples, keys, strict=True)]

    def _credit_turns(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns advantages by turn: turn k's return among those of the siblings that have a turn k."""
        returns = compute_returns_by_trajectory(samples, self.config.turn_discount, add_outcome=self.config.add_outcome)
        siblings: dict[tuple[str, int], list[float]] = {}
        for index, group_id in {sample.trajectory_index: sample.group_id for sample in samples}.items():
            for turn, value in enumerate(returns[index]):
                siblings.setdefault((group_id, turn), []).append(value)
        credits = []
        for sample in samples:
            credit = np.zeros(len(sample), np.float32)
            for turn in np.unique(sample.turn_ids[sample.loss_mask]).tolist():
                advantage = self.compute_advantage(
                    returns[sample.trajectory_index][turn], siblings[sample.group_id, turn]
                )
                credit[sample.loss_mask & (sample.turn_ids == turn)] = advantage
            credits.append(credit)
        return credits


def compute_returns_by_trajectory(
    samples: Sequence[TrainingSample], discount: float, *, add_outcome: bool
) -> dict[int, list[float]]:
    """Returns the discounted returns of each trajectory's turns, by trajectory index.

    Example: two turns, shaped rewards [0.5, 0], reward 1, discount 1: [1.5, 1]; without the outcome [0.5, 0].
    """
    rewards: dict[int, list[float]] = {}
    outcomes: dict[int, float] = {}
    for sample in samples:
        known = rewards.setdefault(sample.trajectory_index, list(sample.turn_rewards or ()))
        known += [0.0] * (int(sample.turn_ids.max(initial=-1)) + 1 - len(known))
        outcomes[sample.trajectory_index] = sample.reward
    if add_outcome:
        for index, known in rewards.items():
            known[-1] += outcomes[index]
    return {index: compute_returns(known, discount) for index, known in rewards.items()}


def ref_kl(sample: TrainingSample) -> FloatArray:
    """Returns the k1 estimate log p_old - log p_ref of each trained token, `[T]`, 0 elsewhere."""
    if sample.ref_logprobs is None:
        raise ValueError("a KL penalty in the reward needs ref_logprobs; set needs = Needs(ref_logprobs=True)")
    old = sample.sampling_logprobs if sample.old_logprobs is None else sample.old_logprobs
    return np.where(sample.loss_mask, old - sample.ref_logprobs, 0).astype(np.float32)
