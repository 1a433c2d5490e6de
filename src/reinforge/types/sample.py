"""What a learner trains on: token arrays with a mask and credit, and the name of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reinforge.types.supports import Supports

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class TrainingSample:
    """One row of tokens; arrays are `[T]`, T the number of tokens of prompt and replies together.

    Example: prompt [1, 2] -> reply [4], then prompt [1, 2, 4, 8] -> reply [5] give
    `token_ids [1, 2, 4, 8, 5]`, `loss_mask [0, 0, 1, 0, 1]`, `turn_ids [-1, -1, 0, -1, 1]`.

    Attributes:
        token_ids: `[T]` every token, in the order the model saw them.
        loss_mask: `[T]` True where the token was sampled by the trained policy (or is supervised) and is trained.
        sampling_logprobs: `[T]` log p under the sampler, over the token's support where that was cut; 0 where
            `loss_mask` is False, NaN where nobody sampled it.
        temperatures: `[T]` temperature each token was drawn at; 1 elsewhere.
        policy_versions: `[T]` version of the weights that drew each token; -1 elsewhere.
        turn_ids: `[T]` index of the turn within its trajectory; -1 where the token is context.
        group_id: Group whose rewards may be compared with this sample's.
        trajectory_index: Index of the trajectory within the job: samples of one trajectory share its reward.
        reward: The trajectory's reward.
        group_rewards: The rewards of all its siblings, itself included: what group-relative credit compares with.
        turn_rewards: Reward of each turn, by turn index, where the trajectory has shaped rewards; else None.
        agent: Name of the agent that spoke.
        agent_weight: What that agent counts in the job beside the others.
        pair_id: Preference pair this belongs to; None outside preference learning. Of its two samples the one with the
            higher reward is preferred; both are in the same optimizer step and micro-batch.
        weight: Multiplies the sample's loss.
        advantages: `[T]` credit of each token, filled by `Algorithm.credit`.
        returns: `[T]` what the critic's values should have been, filled by `Algorithm.credit` where there is a critic.
        old_logprobs, ref_logprobs, values: `[T]`, filled by the engine where the algorithm asks for them.
        supports: The words that each trained token was drawn from, which every log-prob of it is over; None where no
            token's support was cut.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    sampling_logprobs: FloatArray
    temperatures: FloatArray
    policy_versions: IntArray
    turn_ids: IntArray
    group_id: str = ""
    trajectory_index: int = 0
    reward: float = 0.0
    group_rewards: tuple[float, ...] = ()
    turn_rewards: list[float] | None = None
    agent: str = ""
    agent_weight: float = 1.0
    pair_id: str | None = None
    weight: float = 1.0
    advantages: FloatArray | None = None
    returns: FloatArray | None = None
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    supports: Supports | None = None

    @property
    def num_trained(self) -> int:
        """Number of tokens that the loss sees."""
        return int(np.count_nonzero(self.loss_mask))

    def __len__(self) -> int:
        return len(self.token_ids)


def are_finite(samples: Sequence[TrainingSample]) -> bool:
    """Returns True if credit and log-probs of all trained tokens are finite; NaN says that nobody sampled a token."""
    if not np.isfinite([sample.weight for sample in samples]).all():
        return False
    for name in ("advantages", "returns", "old_logprobs", "ref_logprobs", "values"):
        having = [sample for sample in samples if getattr(sample, name) is not None]
        if not np.isfinite(_trained(name, having)).all():
            return False
    return not np.isinf(_trained("sampling_logprobs", samples)).any()


def _trained(name: str, samples: Sequence[TrainingSample]) -> FloatArray:
    """Returns one array of samples at their trained tokens, one behind the other."""
    if not samples:
        return np.zeros(0, np.float32)
    values: FloatArray = np.concatenate([getattr(sample, name) for sample in samples])
    return values[np.concatenate([sample.loss_mask for sample in samples])]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Names a loss of the engine's (or one that a user registered) and its parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What an algorithm asks the engine to compute before credit.

    Attributes:
        old_logprobs: Log-probs under the weights as they are when the job starts: always, or only where the sampler's
            are `inexact` (bfloat16, whose kernels round the two differently); else the sampler's stand in.
        ref_logprobs: Log-probs under the reference weights.
        values: The critic's values.
    """

    old_logprobs: bool | Literal["inexact"] = False
    ref_logprobs: bool = False
    values: bool = False


@dataclass(slots=True)
class UpdateReport:
    """What one job did to the weights.

    Attributes:
        num_updates: Optimizer steps made.
        num_skipped_steps: Steps refused because a number was not finite: credit, log-probs, the loss or the gradient.
        num_samples: Samples trained.
        num_tokens: Tokens that carried loss.
        metrics: Means over the job's steps: `loss`, `grad_norm`, `lr`, and what the loss reports.
        skipped_samples: Indices into the job's samples of those in refused steps.
        skipped_steps: Numbers of the refused steps within the job, from 0.
    """

    num_updates: int
    num_skipped_steps: int
    num_samples: int
    num_tokens: int
    metrics: dict[str, float]
    skipped_samples: list[int] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
