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
    """The prefixes that siblings share: the tokens before their first trained one.

    Attributes:
        token_ids: `[G, P]`, padded on the right with 0.
        lengths: `[G]` number of tokens of each prefix.
        groups: `[B]` index of each sample's prefix.
        runs: The same for `flash_attention.py`; None where siblings are not adjacent, or repeating prefixes costs less.
    """

    token_ids: Tensor
    lengths: Tensor
    groups: Tensor
    runs: list[PrefixRun] | None


@dataclass(slots=True)
class Stems:
    """The beginnings that different prompts share, all of one length: common instructions, for example.

    Attributes:
        token_ids: `[S, C]`.
        groups: Index of each prompt's stem.
    """

    token_ids: Tensor
    groups: Tensor


@dataclass(slots=True)
class BatchSupports:
    """The tokens that each trained token was sampled from, in the order of `loss_mask.nonzero()`.

    Attributes:
        ends: `[N + 1]`, on the host: trained token n was sampled from `token_ids[ends[n] : ends[n + 1]]`; an empty
            range stands for the whole vocabulary, or for a mask.
        token_ids: The kept tokens of all trained tokens, one after the other.
        mask_indices: `[N]`, on the host: row of `masks` with the kept tokens of trained token n; -1 where it has none.
        masks: `[M, V / 8]` uint8: bits over the vocabulary, the lowest token id first.
    """

    ends: np.ndarray
    token_ids: Tensor
    mask_indices: np.ndarray
    masks: Tensor


@dataclass(slots=True)
class TokenBatch:
    """One micro-batch; rows are padded on the right with token 0, mask False and zeros.

    Attributes:
        token_ids: `[B, T]`.
        lengths: `[B]` number of tokens of each row.
        loss_mask: `[B, T]` True where a token is trained; never at t = 0, which has no context.
        temperatures: `[B, T]` temperature at which each token was sampled; 1 elsewhere.
        sampling_logprobs: `[B, T]` log p under the sampler.
        old_logprobs: `[B, T]` log p under the weights at the start of the job; the sampler's where not computed.
        ref_logprobs: `[B, T]` log p under the reference model; None where not computed.
        advantages: `[B, T]` advantage of each token; 0 where the algorithm set none.
        returns: `[B, T]` targets of the critic; None without a critic.
        old_values: `[B, T]` the critic's values at the start of the job; None without a critic.
        weights: `[B]` weight of each sample.
        prefixes: The prefixes that samples share; None where no two samples share one.
        stems: The beginnings that prefixes share (or samples, where there are no prefixes); None where sharing them
            would not pay for another forward pass.
        pairs: `[P, 2]` rows (preferred, other) of each preference pair in the batch.
        entropies: `[B, T]` entropy of each token's distribution; None until the learner sets it.
        values: `[B, T]` the critic's current values, set by the learner; None without a critic.
        old_logprobs_from_learner: True where the learner computed `old_logprobs`, False where they are the sampler's.
        supports: The tokens that each token was sampled from; None where all were sampled from the whole vocabulary.
        kl_baseline: The step's KL(p, p_ref) by the `mismatched` samples, at least 0, set by the learner; None without.
        targets: `[B, T]` tokens whose log-probs are trained; None: those of `token_ids`.
    """

    token_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    temperatures: Tensor
    sampling_logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    prefixes: Prefixes | None = None
    stems: Stems | None = None
    pairs: Tensor | None = None
    entropies: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    values: Tensor | None = None
    old_logprobs_from_learner: bool = False
    supports: BatchSupports | None = None
    kl_baseline: float | None = None
    targets: Tensor | None = None
