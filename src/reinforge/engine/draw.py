"""Draws tokens from logits: one uniform number per token, by its request's seed and its place in the reply.

A counter decides each number, so a reply does not depend on which other replies are in the batch.
Shapes: B rows, V words.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def draw(
    logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor, top_p_B: Tensor | None, top_k_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns a token for each row and its log-prob after temperature, before the support is restricted.

    Inverse of the distribution function: the first token at which the summed probabilities exceed u times their sum.

    Args:
        logits_BV: float32.
        temperatures_B: Divides the logits; 0 takes the most likely token, its log-prob at temperature 1.
        uniforms_B: u, in [0, 1).
        top_p_B: Nucleus of each row, 1 keeps all; None where no row asks.
        top_k_B: Tokens kept in each row, V keeps all; None where no row asks.
    """
    greedy_B = temperatures_B == 0
    scale_B = torch.where(greedy_B, 1.0, temperatures_B)
    logprobs_BV = torch.log_softmax(logits_BV / scale_B[:, None], dim=-1)
    probs_BV = logprobs_BV.exp()
    if top_p_B is not None and top_k_B is not None:
        probs_BV = restrict(probs_BV, top_p_B, top_k_B)
    sums_BV = probs_BV.cumsum(dim=-1)
    thresholds_B = uniforms_B * sums_BV[:, -1]
    tokens_B = torch.searchsorted(sums_BV, thresholds_B[:, None], right=True)[:, 0].clamp_(max=logits_BV.shape[-1] - 1)
    tokens_B = torch.where(greedy_B, logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def restrict(probs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Returns the probabilities with all but the most likely tokens of each row set to 0.

    Example: probs [0.5, 0.3, 0.2], top_p 0.6, top_k 3 -> [0.5, 0.3, 0]: the smallest set that reaches 0.6.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    ranks_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    kept_BV = ((before_BV < top_p_B[:, None]) | (top_p_B[:, None] >= 1)) & (ranks_V[None] < top_k_B[:, None])
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, sorted_BV * kept_BV)
