"""Draws tokens from logits: one uniform number per token, by its request's seed and its place in the reply.

A counter decides each number, so a reply does not depend on which other replies are in the batch.
Shapes: B rows, V words, K of them that are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.sampling.torchscript import scripted
from reinforge.types.supports import MAX_SUPPORT

RANKED = (64, MAX_SUPPORT + 1)
"""How many of the most likely words are ranked before all are: most nuclei are small."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns 64 well-mixed bits of each state: the finaliser of SplitMix64 (Steele et al. 2014, section 3)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(seeds_B: NDArray[np.uint64], counts_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns one number in [0, 1) for each row: the `count`-th of the stream of `seed`, 23 bits of it."""
    bits = mix(mix(seeds_B) + (counts_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


@dataclass(frozen=True, slots=True)
class Cuts:
    """How the support of each row is cut; a word has to pass all three, each of which looks at all words.

    Attributes:
        top_p_B: Nucleus, 1 keeps all.
        top_k_B: Words kept, V keeps all.
        min_p_B: Least share of the most likely word's probability, 0 keeps all.
    """

    top_p_B: Tensor
    top_k_B: Tensor
    min_p_B: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of each row's words.

    Attributes:
        words_BK: The most likely words in falling order; those kept are a row's first `counts_B`, if it has that many.
        counts_B: How many are kept; V where the row is not cut.
        log_mass_B: log of their summed probability.
    """

    words_BK: Tensor
    counts_B: Tensor
    log_mass_B: Tensor


def draw(
    logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor, cuts: Cuts | None = None
) -> tuple[Tensor, Tensor, Kept | None]:
    """Returns a token for each row, its log-prob after temperature over all words, and what the cuts left.

    Inverse of the distribution function: the first token at which the summed probabilities exceed u times their sum.
    Over the words that are kept the token's log-prob is higher by -`log_mass_B`.

    Args:
        logits_BV: float32.
        temperatures_B: Divides the logits; 0 takes the most likely token, its log-prob at temperature 1.
        uniforms_B: u, in [0, 1).
        cuts: None where no row asks.
    """
    if cuts is None:
        return *scripted(_draw, logits_BV.device)(logits_BV, temperatures_B, uniforms_B), None
    logprobs_BV = _logprobs(logits_BV, temperatures_B)
    probs_BV, kept = restrict(logprobs_BV.exp(), cuts)
    return *_pick(logits_BV, logprobs_BV, probs_BV, temperatures_B, uniforms_B), kept


def _draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = _logprobs(logits, temperatures)
    return _pick(logits, logprobs, logprobs.exp(), temperatures, uniforms)


def _logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Returns log-probs after temperature, `[B, V]`; at temperature 0 those at 1."""
    return torch.log_softmax(logits / torch.where(temperatures == 0, 1.0, temperatures)[:, None], dim=-1)


def _pick(
    logits: Tensor, logprobs: Tensor, probs: Tensor, temperatures: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a token for each row of `probs`, `[B, V]`, and its log-prob."""
    sums = probs.cumsum(dim=-1)
    thresholds = uniforms * sums[:, -1]
    tokens = torch.searchsorted(sums, thresholds[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(temperatures == 0, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def restrict(probs_BV: Tensor, cuts: Cuts) -> tuple[Tensor, Kept]:
    """Returns the probabilities with those of the words that are not kept set to 0, and the words that are.

    A few words are ranked first, and more only where some row may keep as many: a full sort takes longer than
    everything else in a draw together. What a row keeps does not depend, to the last bit, on the rows beside it.

    Example: probs [0.5, 0.3, 0.2], top_p 0.6, top_k 3, min_p 0.5
        => [0.5, 0.3, 0]: the smallest set that reaches 0.6; all; those that reach half of 0.5
    """
    vocab_size = probs_BV.shape[-1]
    is_cut_B = (cuts.top_p_B < 1) | (cuts.top_k_B < vocab_size) | (cuts.min_p_B > 0)
    for width in [*(width for width in RANKED if width < vocab_size), vocab_size]:
        top_BK, words_BK = _most_likely(probs_BV, width)
        sums_BK, ranks_K = top_BK.cumsum(dim=-1), torch.arange(width, device=probs_BV.device)
        kept_BK = (sums_BK - top_BK < cuts.top_p_B[:, None]) | (cuts.top_p_B[:, None] >= 1)
        kept_BK &= ranks_K[None] < cuts.top_k_B[:, None]
        kept_BK &= top_BK >= cuts.min_p_B[:, None] * top_BK[:, :1]
        counts_B = kept_BK.sum(dim=-1)  # rounding may leave a hole before the last of them, which this closes
        least_B = top_BK.gather(1, counts_B[:, None] - 1)[:, 0]
        if width == vocab_size or not ((top_BK[:, -1] == least_B) & is_cut_B).any():
            break
    left_BK = torch.where(ranks_K[None] < counts_B[:, None], top_BK, 0.0)
    left_BV = torch.zeros_like(probs_BV).scatter_(1, words_BK, left_BK)
    left_BV = torch.where(is_cut_B[:, None], left_BV, probs_BV)
    mass_B = sums_BK.gather(1, counts_B[:, None] - 1)[:, 0]
    log_mass_B = torch.where(is_cut_B, mass_B.log(), 0.0)
    return left_BV, Kept(words_BK, torch.where(is_cut_B, counts_B, vocab_size), log_mass_B)


def _most_likely(probs_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the highest probabilities in falling order and their words, `[B, K]`; of equals the lower word first."""
    if width == probs_BV.shape[-1]:
        top_BK, words_BK = probs_BV.sort(dim=-1, descending=True, stable=True)
        return top_BK, words_BK
    words_BK = probs_BV.topk(width, sorted=False).indices.sort(dim=-1).values
    top_BK, order_BK = probs_BV.gather(1, words_BK).sort(dim=-1, descending=True, stable=True)
    return top_BK, words_BK.gather(1, order_BK)
