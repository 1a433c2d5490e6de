"""The input of the learner: token arrays with a loss mask and advantages, and the name of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reinforge.types.supports import Supports

Sharding = Literal["auto", "replicate", "full"]
"""`replicate`: each process trains a whole copy. `full`: weights, gradients and optimizer state are sharded across the
processes while they train. `auto`: `full` only if one of them has too little memory for the whole."""


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of one step of AdamW (arXiv:1711.05101)."""

    learning_rate: float  # size of the step, at least 0
    betas: tuple[float, float] = (0.9, 0.95)  # decay rates of the first and second moment, in [0, 1)
    eps: float = 1e-8  # added to the denominator, above 0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None  # gradients are clipped to this global norm; None: not clipped


@dataclass(slots=True)
class GradientReport:
    """What one call added to the gradients."""

    loss: float  # sum of the loss over the trained tokens of all samples
    logprobs: list[FloatArray]
    """log p of each sample's trained tokens under the current weights, `[T]` each, 0 elsewhere."""
    metrics: dict[str, float]  # means of the loss's metrics over the trained tokens


FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(slots=True)
class TrainingSample:
    """One sequence of tokens. Arrays have the shape `[T]`, T being the tokens of prompt and replies together.

    Example: prompt [1, 2] -> reply [4], then prompt [1, 2, 4, 8] -> reply [5] give
    `token_ids [1, 2, 4, 8, 5]`, `loss_mask [0, 0, 1, 0, 1]`, `turn_ids [-1, -1, 0, -1, 1]`.
    """

    token_ids: IntArray  # `[T]` all tokens, in order
    loss_mask: BoolArray  # `[T]` True for tokens to train: sampled by the trained policy, or supervised
    sampling_logprobs: FloatArray
    """`[T]` log p under the sampler, over the kept tokens if there was a sampling filter; 0 if `loss_mask` is False,
    NaN for tokens that were not sampled."""
    temperatures: FloatArray  # `[T]` sampling temperature of each token; 1 for context
    policy_versions: IntArray  # `[T]` version of the weights that sampled each token; -1 for context
    turn_ids: IntArray  # `[T]` index of the turn within the trajectory; -1 for context
    group_id: str = ""  # the group of siblings that the sample belongs to
    trajectory_index: int = 0  # index of the trajectory within the job; samples of one trajectory share its reward
    reward: float = 0.0
    group_rewards: tuple[float, ...] = ()  # rewards of all siblings, including its own, for group-relative advantages
    turn_rewards: list[float] | None = None  # reward of each turn if the trajectory has shaped rewards, else None
    agent: str = ""
    agent_weight: float = 1.0
    pair_id: str | None = None
    """The preference pair that the sample belongs to; None outside preference learning. The sample of a pair with the
    higher reward is preferred; both are in the same optimizer step and micro-batch."""
    weight: float = 1.0  # factor of the sample's loss
    advantages: FloatArray | None = None  # `[T]` advantage of each token, set by `Algorithm.credit`
    returns: FloatArray | None = None
    """`[T]` regression targets of the critic, set by `Algorithm.credit` if there is a critic."""
    old_logprobs: FloatArray | None = None  # `[T]`, set by the engine if the algorithm needs them
    ref_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    mismatched: TrainingSample | None = None
    """The sample's prompt with the reply to another prompt, by which KTO estimates the KL of a step; scored with the
    sample, never trained."""
    supports: Supports | None = None
    """The kept tokens of each trained position; its log-probs are normalized over them. None if there was no sampling
    filter."""
    defers_old_logprobs: bool = False  # the update sets `old_logprobs`, by the forward pass that it makes anyway
    is_stale: bool = False  # True if an older version than the one that the job starts from sampled some of its tokens
    targets: IntArray | None = None
    """`[T]` tokens whose log-probs are trained in place of those of `token_ids`, which stay the context; None: the
    tokens themselves, as in everything that was sampled."""

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def __len__(self) -> int:
        return len(self.token_ids)


def add_mismatched_samples(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    return [*samples, *(sample.mismatched for sample in samples if sample.mismatched is not None)]


def are_finite(samples: Sequence[TrainingSample]) -> bool:
    """Returns True if the numbers of all trained tokens are finite; `sampling_logprobs` may be NaN (not sampled)."""
    if not np.isfinite([sample.weight for sample in samples]).all():
        return False
    for name in ("advantages", "returns", "old_logprobs", "ref_logprobs", "values"):
        present = [sample for sample in samples if getattr(sample, name) is not None]
        if not np.isfinite(_gather_trained(name, present)).all():
            return False
    return not np.isinf(_gather_trained("sampling_logprobs", samples)).any()


def _gather_trained(name: str, samples: Sequence[TrainingSample]) -> FloatArray:
    if not samples:
        return np.zeros(0, np.float32)
    values: FloatArray = np.concatenate([getattr(sample, name) for sample in samples])
    return values[np.concatenate([sample.loss_mask for sample in samples])]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The name of a loss, of the engine or registered by a user, and its parameters."""

    name: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the engine must compute before an algorithm computes advantages."""

    old_logprobs: bool | Literal["inexact"] = False
    """Log-probs under the weights at the start of the job. True: always; `inexact`: only if those of the sampler differ
    (bfloat16, which sampler and learner round differently, or older weights); False: use the sampler's."""
    ref_logprobs: bool = False  # log-probs under the reference weights
    values: bool = False  # the critic's values


@dataclass(slots=True)
class UpdateReport:
    """Result of one training job."""

    num_updates: int
    num_skipped_steps: int  # steps skipped because advantages, log-probs, the loss or the gradient were not finite
    num_samples: int
    num_tokens: int
    metrics: dict[str, float]
    """Means over the steps of the job: `loss`, `grad_norm`, `lr`, and those that the loss reports."""
    skipped_samples: list[int] = field(default_factory=list)  # indices of the samples in skipped steps
    skipped_steps: list[int] = field(default_factory=list)  # numbers of the skipped steps within the job, from 0
