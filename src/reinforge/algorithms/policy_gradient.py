"""What the algorithms share that compare siblings and follow the policy gradient: settings, samples, credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from reinforge.algorithms.advantages import relative_to, turn_returns
from reinforge.algorithms.samples import on_mask, samples_of_groups, weigh_by_trajectory
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm, Needs
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup

ClipLow = Annotated[float, Field(gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")]
ClipHigh = Annotated[float, Field(gt=0, description="The ratio is clipped above at 1 + clip_high.")]
Scale = Annotated[bool, Field(description="Divide by the group's standard deviation.")]
TisCap = Annotated[
    float | None,
    Field(
        ge=1,
        description="Where learner and sampler round differently (bfloat16), a token counts p_learner / p_sampler, at "
        "most this; null: 1.",
    ),
]
KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    Field(description="Schulman's estimator of the KL in the loss; the mean gradient of k1 is zero there."),
]
Aggregation = Annotated[
    Literal["sequence", "token", "constant"],
    Field(
        description="Mean over each trajectory first, over all tokens alike, or sums over samples by constant_length."
    ),
]


SHARED = ("tis_cap", "kl_coef", "kl_estimator", "entropy_coef")
"""Settings that the loss of every policy gradient takes."""


class PolicyGradientConfig(AlgorithmConfig):
    """What every policy gradient can be told."""

    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy, which is raised.")
    tis_cap: TisCap = 2.0
    credit: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description="Credit of a token: its trajectory's reward, or the shaped rewards of its turn and later ones.",
    )
    turn_discount: float = Field(
        default=1.0, ge=0, le=1, description="credit turn: what a reward counts one turn earlier."
    )
    add_outcome: bool = Field(
        default=True,
        description="credit turn: the trajectory's reward is one more of its last turn; "
        "false where shaped rewards have it in them.",
    )


class ClippedConfig(PolicyGradientConfig):
    """A policy gradient whose ratio is clipped."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(
        default=None, gt=1, description="Clip the ratio here where credit is negative (3 is usual); null: nowhere."
    )
    aggregation: Aggregation = "sequence"
    constant_length: int = Field(
        default=256, ge=1, description="aggregation constant: divides each sum; about the most tokens of a reply."
    )


class PolicyGradient(Algorithm):
    """Credit relative to siblings and a loss that follows the policy gradient.

    Subclasses say by `compare` what a reward is worth among its siblings', and by `loss_of` the loss.

    Args:
        config: The settings.
    """

    config: PolicyGradientConfig
    needs_groups = True

    def __init__(self, config: PolicyGradientConfig):
        self.config = config
        self.needs = Needs(old_logprobs="inexact", ref_logprobs=config.kl_coef > 0)
        self.loss = self.loss_of()

    def loss_of(self) -> LossSpec:
        """Returns the clipped policy gradient with the parameters of the settings."""
        constant = ["constant_length"] if self.aggregation == "constant" else []
        return self.spec("clipped_pg", ["clip_low", "clip_high", "dual_clip", *constant])

    def spec(self, name: str, params: Sequence[str]) -> LossSpec:
        """Returns a loss whose parameters are the settings of these names, and those of every policy gradient."""
        names = [*params, *SHARED]
        return LossSpec(name, {param: getattr(self.config, param) for param in names if hasattr(self.config, param)})

    @property
    def aggregation(self) -> str:
        """How the losses of tokens become one number."""
        return getattr(self.config, "aggregation", "sequence")

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of all groups; with `aggregation: sequence` each trajectory weighs the same."""
        samples = samples_of_groups(groups)
        if self.aggregation == "sequence":
            weigh_by_trajectory(samples)
        return samples

    def compare(self, reward: float, siblings: Sequence[float]) -> float:
        """Returns what a reward (or a turn's return) is worth among those of all siblings, itself included."""
        return relative_to(reward, siblings, scale=getattr(self.config, "scale_advantages", False))

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns each sample's advantages `[T]`: its trajectory's credit on every trained token, or its turn's."""
        if self.config.credit == "turn":
            return self._credit_of_turns(samples)
        keys = [(sample.reward, sample.group_rewards) for sample in samples]  # a trajectory may have many samples
        worth = {key: self.compare(*key) for key in dict.fromkeys(keys)}
        return [on_mask(sample, worth[key]) for sample, key in zip(samples, keys, strict=True)]

    def _credit_of_turns(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Compares the return of turn k with that of turn k of the siblings that have samples and got so far."""
        returns = returns_by_turn(samples, self.config.turn_discount, add_outcome=self.config.add_outcome)
        siblings: dict[tuple[str, int], list[float]] = {}
        for index, group_id in {sample.trajectory_index: sample.group_id for sample in samples}.items():
            for turn, value in enumerate(returns[index]):
                siblings.setdefault((group_id, turn), []).append(value)
        credits = []
        for sample in samples:
            credit = np.zeros(len(sample), np.float32)
            for turn in np.unique(sample.turn_ids[sample.loss_mask]).tolist():
                worth = self.compare(returns[sample.trajectory_index][turn], siblings[sample.group_id, turn])
                credit[sample.loss_mask & (sample.turn_ids == turn)] = worth
            credits.append(credit)
        return credits


def returns_by_turn(samples: Sequence[TrainingSample], discount: float, *, add_outcome: bool) -> dict[int, list[float]]:
    """Returns the discounted returns of each trajectory's turns, by trajectory index.

    Example: two turns, shaped rewards [0.5, 0], reward 1, discount 1: [1.5, 1]; without the outcome [0.5, 0].

    Args:
        samples: Of the job.
        discount: What a reward counts one turn earlier.
        add_outcome: The trajectory's reward counts at its last turn too.
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
    return {index: turn_returns(known, discount) for index, known in rewards.items()}


def ref_kl(sample: TrainingSample) -> FloatArray:
    """Returns log p - log p_ref of each trained token under the weights that drew it, `[T]`, 0 elsewhere: k1."""
    if sample.ref_logprobs is None:
        raise ValueError("the KL in a reward needs ref_logprobs: Needs(ref_logprobs=True)")
    old = sample.sampling_logprobs if sample.old_logprobs is None else sample.old_logprobs
    return np.where(sample.loss_mask, old - sample.ref_logprobs, 0).astype(np.float32)
