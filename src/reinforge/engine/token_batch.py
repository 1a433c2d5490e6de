"""Training samples as padded tensors, and how samples are cut into micro-batches.

Shapes: B samples, T tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reinforge.engine.model.flash_attention import Run


@dataclass(slots=True)
class Prefixes:
    """What siblings have in common: the tokens before the first trained one.

    Attributes:
        token_ids: `[G, P]`, padded on the right with 0.
        lengths: `[G]` tokens of each.
        groups: `[B]` the prefix of each sample.
        runs: The same for `causal.py`; None where siblings do not stand side by side, or repeating prefixes costs less.
    """

    token_ids: Tensor
    lengths: Tensor
    groups: Tensor
    runs: list[Run] | None


@dataclass(slots=True)
class Stems:
    """What different prompts begin with, all up to the same token: instructions, say, or the first squares of a board.

    Attributes:
        token_ids: `[S, C]`.
        groups: The stem of each row of the prompts.
    """

    token_ids: Tensor
    groups: Tensor


@dataclass(slots=True)
class BatchSupports:
    """The words that trained tokens were drawn from, in the order of `loss_mask.nonzero()`.

    Attributes:
        ends: `[N + 1]`, on the host: token n was drawn from `words[ends[n] : ends[n + 1]]`; from every word, if none.
        words: The words.
    """

    ends: np.ndarray
    words: Tensor


@dataclass(slots=True)
class TokenBatch:
    """What a loss sees; rows are padded on the right with token 0, mask False and zeros.

    Attributes:
        token_ids: `[B, T]`.
        lengths: `[B]` tokens of each row.
        loss_mask: `[B, T]` True where a token is trained; never at t = 0, which nothing comes before.
        temperatures: `[B, T]` temperature each token was drawn at; 1 elsewhere.
        sampling_logprobs: `[B, T]` log p under the sampler.
        old_logprobs: `[B, T]` log p under the weights that the job began with; the sampler's where not computed.
        ref_logprobs: `[B, T]` log p under the reference; None where not computed.
        advantages: `[B, T]` credit; 0 where an algorithm gave none.
        returns: `[B, T]` what the critic's values should be; None where there is no critic.
        old_values: `[B, T]` the critic's values when the job began; None where there is no critic.
        weights: `[B]` weight of each sample.
        prefixes: What samples share; None where each begins in its own way.
        stems: What prefixes begin with, or samples where there are no prefixes; None where that is not worth a pass.
        pairs: `[P, 2]` rows of each preference pair whose two samples are here: the preferred one, the other one.
        entropies: `[B, T]` entropy of each token's distribution, set by the learner; None before it ran.
        values: `[B, T]` the critic's values as it is, set by the learner; None where there is no critic.
        old_is_learners: True where the learner has computed `old_logprobs`, False where they are the sampler's.
        supports: What trained tokens were drawn from; None where each was drawn from every word.
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
    old_is_learners: bool = False
    supports: BatchSupports | None = None
