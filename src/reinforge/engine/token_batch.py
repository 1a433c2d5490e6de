"""Training samples as padded tensors: what a loss sees of one micro-batch.

Shapes: B samples, T tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reinforge.engine.model.flash_attention import PrefixRun


@dataclass(slots=True)
class Prefixes:
    """The prefixes that siblings share: the tokens before their first trained one."""

    token_ids: Tensor  # `[G, P]`, padded on the right with 0
    lengths: Tensor  # `[G]` number of tokens of each prefix
    groups: Tensor  # `[B]` index of each sample's prefix
    runs: list[PrefixRun] | None  # for `flash_attention.py`; None: siblings are apart, or repeating costs less


@dataclass(slots=True)
class Stems:
    """The beginnings that different prompts share, all of one length: common instructions, for example."""

    token_ids: Tensor  # `[S, C]`
    groups: Tensor  # index of each prompt's stem


@dataclass(slots=True)
class BatchSupports:
    """The tokens that each trained token was sampled from, in the order of `loss_mask.nonzero()`."""

    ends: np.ndarray
    """`[N + 1]`, on the host: trained token n was sampled from `token_ids[ends[n] : ends[n + 1]]`; an empty range
    stands for the whole vocabulary, or for a mask."""
    token_ids: Tensor  # the kept tokens of all trained tokens, one after the other
    mask_indices: np.ndarray  # `[N]`, on the host: row of `masks` with the kept tokens; -1: it has none
    masks: Tensor  # `[M, V / 8]` uint8: bits over the vocabulary, the lowest token id first


@dataclass(slots=True)
class TokenBatch:
    """One micro-batch; rows are padded on the right with token 0, mask False and zeros."""

    token_ids: Tensor  # `[B, T]`
    lengths: Tensor  # `[B]` number of tokens of each row
    loss_mask: Tensor  # `[B, T]` True where a token is trained; never at t = 0, which has no context
    temperatures: Tensor  # `[B, T]` temperature at which each token was sampled; 1 elsewhere
    sampling_logprobs: Tensor  # `[B, T]` log p under the sampler
    old_logprobs: Tensor  # `[B, T]` log p under the weights at the start of the job; the sampler's where not computed
    ref_logprobs: Tensor | None  # `[B, T]` log p under the reference model; None where not computed
    advantages: Tensor  # `[B, T]` advantage of each token; 0 where the algorithm set none
    weights: Tensor  # `[B]` weight of each sample
    prefixes: Prefixes | None = None  # the prefixes that samples share; None where no two samples share one
    stems: Stems | None = None  # that prefixes (or samples) share; None: sharing does not pay
    pairs: Tensor | None = None  # `[P, 2]` rows (preferred, other) of each preference pair in the batch
    entropies: Tensor | None = None  # `[B, T]` entropy of each token's distribution; None until the learner sets it
    returns: Tensor | None = None  # `[B, T]` targets of the critic; None without a critic
    old_values: Tensor | None = None  # `[B, T]` the critic's values at the start of the job; None without a critic
    values: Tensor | None = None  # `[B, T]` the critic's current values, set by the learner; None without a critic
    old_logprobs_from_learner: bool = False  # False: `old_logprobs` are the sampler's
    supports: BatchSupports | None = None  # what tokens were sampled from; None: the whole vocabulary
    kl_baseline: float | None = None  # the step's KL(p, p_ref) by `mismatched` samples, set by the learner
    targets: Tensor | None = None  # `[B, T]` tokens whose log-probs are trained; None: those of `token_ids`
