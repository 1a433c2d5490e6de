"""Samples tokens from logits, with one uniform number per token, from its request's seed and its place in the reply.

A counter decides each number, so a reply does not depend on the other replies in the batch.

Shapes: B rows, V vocabulary, K ranked tokens.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.types.supports import MAX_SUPPORT

logger = logging.getLogger(__name__)


def compile_torchscript(
    function: Callable[..., Any], device: torch.device, *, enabled: bool = True
) -> Callable[..., Any]:
    """Returns the function compiled by TorchScript on a CPU; unchanged on other devices, where it is untested.

    Between any two operations a thread that runs Python waits for the lock, up to 5 ms each time while agents run;
    TorchScript releases the lock once for all of them. torch calls TorchScript deprecated: without it the function
    stays unchanged.
    """
    return _compile(function) if enabled and device.type == "cpu" else function


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(function)
        except Exception as cause:  # noqa: BLE001  the plain function is as correct, whatever the reason
            logger.info("sampling without TorchScript (slower): %s", cause)
            return function


RANK_WIDTHS = (64, MAX_SUPPORT + 1)
"""How many of the most likely tokens are ranked before all are: most nuclei are small."""

LARGE_VOCAB = 4096
"""From this vocabulary on, a CPU samples by blocks: each pass over the logits of a batch goes to memory and back."""

BLOCK_TOKENS = 128  # tokens of a block

CHUNK_LOGITS = 2**18  # logits of the rows that are sampled together by blocks: 1 MiB, which the caches hold

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix_bits(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw_uniforms(seeds_B: NDArray[np.uint64], counts_B: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns one number in [0, 1) per row: number `count` of the stream of `seed`, with 23 random bits."""
    bits = mix_bits(mix_bits(seeds_B) + (counts_B.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """The sampling filters of each row; a token has to pass all three, and each filter looks at all tokens."""

    top_p_B: Tensor  # nucleus; 1 keeps all tokens
    top_k_B: Tensor  # number of most likely tokens to keep; V keeps all
    min_p_B: Tensor  # smallest share of the most likely token's probability; 0 keeps all


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that pass each row's filters."""

    tokens_BK: Tensor  # the most likely tokens, in falling order; a row keeps its first `counts_B`, if K is that large
    counts_B: Tensor  # number of kept tokens; V where the row has no filter
    log_mass_B: Tensor  # log of their summed probability


def sample_tokens(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    uniforms_B: Tensor,
    filters: SamplingFilters | None = None,
    *,
    torchscript: bool = True,
) -> tuple[Tensor, Tensor, KeptTokens | None]:
    """Returns a token for each row, its log-prob after temperature over the whole vocabulary, and the kept tokens.

    Inverse of the distribution function: the first token at which the summed probabilities exceed u times their sum.
    Over the kept tokens the log-prob is higher by -`log_mass_B`.

    Args:
        logits_BV: float32.
        temperatures_B: Divides the logits; 0 takes the most likely token, with its log-prob at temperature 1.
        uniforms_B: u, in [0, 1).
        filters: None where no row has one.
        torchscript: Run the function without filters by TorchScript, where it exists.
    """
    vocab_size = logits_BV.shape[-1]
    if filters is None and vocab_size >= LARGE_VOCAB and logits_BV.device.type == "cpu":
        sample = compile_torchscript(_sample_by_blocks, logits_BV.device, enabled=torchscript)
        num_rows = max(1, CHUNK_LOGITS // vocab_size)
        return *sample(logits_BV, temperatures_B, uniforms_B, num_rows, BLOCK_TOKENS), None
    if filters is None:
        sample = compile_torchscript(_sample, logits_BV.device, enabled=torchscript)
        return *sample(logits_BV, temperatures_B, uniforms_B), None
    logprobs_BV = compute_logprobs(logits_BV, temperatures_B)
    probs_BV, kept = apply_filters(logprobs_BV.exp(), filters)
    return *invert_distribution(logits_BV, logprobs_BV, probs_BV, temperatures_B, uniforms_B), kept


def _sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = compute_logprobs(logits, temperatures)
    return invert_distribution(logits, logprobs, logprobs.exp(), temperatures, uniforms)


def _sample_by_blocks(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, num_rows: int, block: int
) -> tuple[Tensor, Tensor]:
    """Returns what `_sample` returns, rounding apart: sums of blocks find the block, sums within it the token.

    Example: probs [0.1, 0.2, 0.3, 0.4], blocks of 2, u = 0.5: sums of blocks [0.3, 1.0] -> the second;
        0.5 in its own sums [0.3 + 0.3, 0.3 + 0.7] -> the first, token 2
    """
    tokens, logprobs = torch.empty_like(temperatures, dtype=torch.long), torch.empty_like(temperatures)
    size, has_greedy = logits.shape[1], bool((temperatures == 0).any())
    places = torch.arange(block, device=logits.device)[None]
    for start in range(0, logits.shape[0], num_rows):
        heat = temperatures[start : start + num_rows, None]
        scaled = logits[start : start + num_rows] / torch.where(heat == 0, 1.0, heat)
        peak = scaled.amax(dim=-1, keepdim=True)
        probs = (scaled - peak).exp_()
        whole = size - size % block
        blocks = probs[:, :whole].reshape(-1, whole // block, block).sum(dim=-1)
        if whole < size:
            blocks = torch.cat((blocks, probs[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
        sums = blocks.cumsum(dim=-1)
        thresholds = uniforms[start : start + num_rows, None] * sums[:, -1:]
        found = torch.searchsorted(sums, thresholds, right=True).clamp_(max=sums.shape[1] - 1)
        columns = found * block + places
        own = torch.where(columns < size, probs.gather(1, columns.clamp(max=size - 1)), 0.0).cumsum(dim=-1)
        # added, not subtracted from the threshold: at a block's border the difference rounds to a negative number, and
        # the first token of the block would be taken, whatever its probability
        own += torch.where(found == 0, 0.0, sums.gather(1, (found - 1).clamp(min=0)))
        last = torch.searchsorted(own, own[:, -1:].contiguous())  # the last token with a probability
        chosen = found * block + torch.minimum(torch.searchsorted(own, thresholds, right=True), last)
        if has_greedy:
            chosen = torch.where(heat == 0, scaled.argmax(dim=-1, keepdim=True), chosen)
        tokens[start : start + num_rows] = chosen[:, 0]
        logprobs[start : start + num_rows] = (scaled.gather(1, chosen) - peak - sums[:, -1:].log())[:, 0]
    return tokens, logprobs


def compute_logprobs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Returns log-probs after temperature, `[B, V]`; for temperature 0 those at 1."""
    return torch.log_softmax(logits / torch.where(temperatures == 0, 1.0, temperatures)[:, None], dim=-1)


def invert_distribution(
    logits: Tensor, logprobs: Tensor, probs: Tensor, temperatures: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a token for each row of `probs`, `[B, V]`, and its log-prob."""
    sums = probs.cumsum(dim=-1)
    thresholds = uniforms * sums[:, -1]
    tokens = torch.searchsorted(sums, thresholds[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(temperatures == 0, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def apply_filters(probs_BV: Tensor, filters: SamplingFilters) -> tuple[Tensor, KeptTokens]:
    """Returns the probabilities with those of removed tokens set to 0, and the kept tokens.

    A few tokens are ranked first, and more only where some row may keep that many: a full sort takes longer than all
    the rest of sampling. What a row keeps does not depend, to the last bit, on the other rows.

    Example: probs [0.5, 0.3, 0.2], top_p 0.6, top_k 3, min_p 0.5
        => [0.5, 0.3, 0]: the smallest set that reaches 0.6; all; those that reach half of 0.5
    """
    vocab_size = probs_BV.shape[-1]
    is_filtered_B = (filters.top_p_B < 1) | (filters.top_k_B < vocab_size) | (filters.min_p_B > 0)
    for width in [*(width for width in RANK_WIDTHS if width < vocab_size), vocab_size]:
        top_BK, tokens_BK = _rank_tokens(probs_BV, width)
        sums_BK, ranks_K = top_BK.cumsum(dim=-1), torch.arange(width, device=probs_BV.device)
        kept_BK = (sums_BK - top_BK < filters.top_p_B[:, None]) | (filters.top_p_B[:, None] >= 1)
        kept_BK &= ranks_K[None] < filters.top_k_B[:, None]
        kept_BK &= top_BK >= filters.min_p_B[:, None] * top_BK[:, :1]
        counts_B = kept_BK.sum(dim=-1)  # rounding may leave a hole before the last kept token; counting closes it
        least_B = top_BK.gather(1, counts_B[:, None] - 1)[:, 0]
        if width == vocab_size or not ((top_BK[:, -1] == least_B) & is_filtered_B).any():
            break
    top_BK = torch.where(ranks_K[None] < counts_B[:, None], top_BK, 0.0)
    filtered_BV = torch.zeros_like(probs_BV).scatter_(1, tokens_BK, top_BK)
    filtered_BV = torch.where(is_filtered_B[:, None], filtered_BV, probs_BV)
    mass_B = sums_BK.gather(1, counts_B[:, None] - 1)[:, 0]
    log_mass_B = torch.where(is_filtered_B, mass_B.log(), 0.0)
    return filtered_BV, KeptTokens(tokens_BK, torch.where(is_filtered_B, counts_B, vocab_size), log_mass_B)


def rank_logprobs(logits_BV: Tensor, temperatures_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` most likely tokens of each row, `[B, K]`, and their log-probs, over the whole vocabulary.

    Example: probs [0.2, 0.5, 0.3], count 2 => tokens [1, 2], log-probs [log 0.5, log 0.3]
    """
    top_BK, tokens_BK = _rank_tokens(compute_logprobs(logits_BV, temperatures_B), min(count, logits_BV.shape[-1]))
    return tokens_BK, top_BK


def _rank_tokens(probs_BV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the highest probabilities in falling order and their tokens, `[B, K]`; of equals the lower id first."""
    if width == probs_BV.shape[-1]:
        top_BK, tokens_BK = probs_BV.sort(dim=-1, descending=True, stable=True)
        return top_BK, tokens_BK
    tokens_BK = probs_BV.topk(width, sorted=False).indices.sort(dim=-1).values
    top_BK, order_BK = probs_BV.gather(1, tokens_BK).sort(dim=-1, descending=True, stable=True)
    return top_BK, tokens_BK.gather(1, order_BK)
