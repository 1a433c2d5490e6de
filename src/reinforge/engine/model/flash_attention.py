"""Causal attention of rows, and of rows over a prefix that they share, by torch's flash kernel for CPUs.

Measured by its times, the kernel skips later keys only in blocks of 512, so queries go to it in chunks, each with the
keys up to its end. The queries of rows with the same prefix go to it side by side, over one copy of the prefix's keys
and values. The two parts are combined by their log-sum-exps, and the kernel's backward pass, given the combined output
and log-sum-exp, returns each part's gradient (as blocks do in Ring Attention, arXiv:2310.01889).

Shapes: B rows, G prefixes, m rows of a prefix, H heads, K heads of keys and values, S tokens of a row, P of a prefix,
D size of a head.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

logger = logging.getLogger(__name__)

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CHUNK_QUERIES = 96  # queries in a chunk; up to twice as many are computed without chunks
LONG_ROW = 1024  # tokens from which the kernel is faster in bfloat16, in one chunk: 0.73 x at 2,048, 0.68 x at 4,096


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Adjacent rows of adjacent prefixes, each prefix with the same number of rows."""

    rows: slice  # their place in the batch
    prefixes: slice  # their place among the prefixes
    members: int  # rows of each prefix, m
    length: int  # tokens of the longest prefix
    mask: Tensor | None = None  # added to the scores of shorter prefixes, `[G, 1, 1, P]`; None: all are equally long


def find_prefix_runs(groups: Sequence[int], lengths: Sequence[int]) -> list[PrefixRun] | None:
    """Returns the runs of rows, or None where the rows of one prefix are not adjacent.

    Example: prefixes 0 0 1 1 2 of the rows -> rows 0 to 4 with 2 members each, row 4 with 1.
    """
    if list(groups) != sorted(groups) or set(groups) != set(range(len(lengths))):
        return None
    runs: list[PrefixRun] = []
    for members, group in groupby(range(len(lengths)), key=Counter(groups).__getitem__):
        prefixes = list(group)
        first = runs[-1].rows.stop if runs else 0
        run_lengths = torch.tensor(lengths[prefixes[0] : prefixes[-1] + 1])
        length = int(run_lengths.max())
        unseen = torch.arange(length) >= run_lengths[:, None]
        mask = torch.where(unseen, -torch.inf, 0.0)[:, None, None] if unseen.any() else None
        rows = slice(first, first + members * len(prefixes))
        runs.append(PrefixRun(rows, slice(prefixes[0], prefixes[-1] + 1), members, length, mask))
    return runs


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    runs: Sequence[PrefixRun] = (),
) -> Tensor:
    """Returns softmax(q k^T scale) v over the keys up to each query and over all of its prefix, `[B, S, H, D]`.

    Args:
        query: `[B, H, S, D]`; key and value are `[B, K, S, D]`.
        prefix: Keys and values, `[G, K, P, D]` each.
    """
    output = _FlashAttention.apply(query, key, value, scale, () if prefix is None else runs, *(prefix or ()))
    return output.transpose(1, 2)


class _FlashAttention(Function):
    """`(q, k, v, scale, runs, prefix keys, prefix values) -> [B, H, S, D]`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, runs: Sequence[PrefixRun], *prefix: Tensor
    ) -> Tensor:
        """Returns the attention; saves it with its log-sum-exps and the inputs."""
        saved = query, key, value, *prefix
        query, key, value, *before = _widen(saved, runs)
        parts = [
            _FLASH(
                query[:, :, a:b],
                key[:, :, :b],
                value[:, :, :b],
                0.0,
                a == 0,
                attn_mask=_build_chunk_mask(query, a, b),
                scale=scale,
            )
            for a, b in _split_queries(query)
        ]
        output, sums = parts[0] if len(parts) == 1 else (_concat_chunks(column) for column in zip(*parts, strict=True))
        for run in runs:
            over_prefix, prefix_sums = _FLASH(
                _group_rows(query, run),
                *_select_prefixes(before, run),
                0.0,
                False,
                attn_mask=_expand_mask(query, run),
                scale=scale,
            )
            over_prefix = _ungroup_rows(over_prefix, run)
            prefix_sums = _ungroup_rows(prefix_sums[..., None], run)[..., 0]
            own_sums = sums[run.rows]
            total_sums = torch.logaddexp(own_sums, prefix_sums)
            output[run.rows].mul_((own_sums - total_sums).exp_()[..., None])
            output[run.rows].addcmul_(over_prefix, (prefix_sums - total_sums).exp_()[..., None].to(output.dtype))
            own_sums.copy_(total_sums)
        ctx.scale, ctx.runs = scale, runs
        output = output.to(saved[0].dtype)
        ctx.save_for_backward(output, sums, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of queries, keys and values."""
        output, sums, *saved = ctx.saved_tensors
        output, gradient, query, key, value, *prefix = _widen((output, gradients[0], *saved), ctx.runs)
        query_grads: list[Tensor] = []
        key_value_grads: list[Tensor] = []
        for a, b in reversed(_split_queries(query)):  # the last chunk has a gradient for every key
            query_grad, *chunk_grads = _BACKWARD(
                gradient[:, :, a:b],
                query[:, :, a:b],
                key[:, :, :b],
                value[:, :, :b],
                output[:, :, a:b],
                sums[:, :, a:b],
                0.0,
                a == 0,
                attn_mask=_build_chunk_mask(query, a, b),
                scale=ctx.scale,
            )
            query_grads.append(query_grad)
            key_value_grads = key_value_grads or chunk_grads
            if key_value_grads is not chunk_grads:
                for whole, part in zip(key_value_grads, chunk_grads, strict=True):
                    whole[:, :, :b] += part
        query_grad = query_grads[0] if len(query_grads) == 1 else _concat_chunks(query_grads[::-1])
        prefix_grads = [torch.zeros_like(states) for states in prefix]
        for run in ctx.runs:
            part_grad, *run_grads = _BACKWARD(
                _group_rows(gradient, run),
                _group_rows(query, run),
                *_select_prefixes(prefix, run),
                _group_rows(output, run),
                _group_rows(sums[..., None], run)[..., 0],
                0.0,
                False,
                attn_mask=_expand_mask(query, run),
                scale=ctx.scale,
            )
            query_grad[run.rows] += _ungroup_rows(part_grad, run)
            for whole, part in zip(prefix_grads, run_grads, strict=True):
                whole[run.prefixes, :, : run.length] = part
        query_grad, *key_value_grads = (each.to(saved[0].dtype) for each in (query_grad, *key_value_grads))
        return query_grad, *key_value_grads, None, None, *(each.to(saved[0].dtype) for each in prefix_grads)


def _widen(states: Sequence[Tensor], runs: Sequence[PrefixRun]) -> list[Tensor]:
    """Returns states, the first of a row's own tokens, in float32 where the kernel's backward pass gains by it."""
    # in bfloat16 it takes 5 x as long on a CPU without such products, and 1.5 x on short rows of others
    longest = max(states[0].shape[2], *(run.length for run in runs), 0)
    fast = longest >= LONG_ROW and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return [each if fast or each.dtype.itemsize >= 4 else each.float() for each in states]


def _split_queries(query: Tensor) -> list[tuple[int, int]]:
    """Returns start and end of each chunk of queries, all about the same size; long rows in bfloat16 have one.

    Example: 200 -> [(0, 67), (67, 133), (133, 200)]; 192 -> [(0, 192)].
    """
    length = query.shape[2]
    count = 1 if length <= 2 * CHUNK_QUERIES or query.dtype == torch.bfloat16 else -(-length // CHUNK_QUERIES)
    return list(pairwise(round(length * i / count) for i in range(count + 1)))


def _build_chunk_mask(query: Tensor, start: int, end: int) -> Tensor | None:
    """Returns the causal mask of the queries from `start` to `end`; None for the first chunk: the kernel applies it."""
    if start == 0:
        return None
    mask = torch.full((end - start, end), -torch.inf, dtype=query.dtype, device=query.device)
    return mask.triu_(start + 1).expand(len(query), 1, -1, -1)


def _concat_chunks(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


def _group_rows(states: Tensor, run: PrefixRun) -> Tensor:
    """Returns the run's rows, `[G m, H, S, D]`, as `[G, H, m S, D]`; no copy where a token's heads are adjacent."""
    _, heads, length, size = states.shape
    return states[run.rows].transpose(1, 2).reshape(-1, run.members * length, heads, size).transpose(1, 2)


def _ungroup_rows(states: Tensor, run: PrefixRun) -> Tensor:
    """Returns `[G, H, m S, D]` as `[G m, H, S, D]`."""
    groups, heads, length, size = states.shape
    rows = states.transpose(1, 2).reshape(groups * run.members, length // run.members, heads, size)
    return rows.transpose(1, 2)


def _select_prefixes(prefix: Sequence[Tensor], run: PrefixRun) -> list[Tensor]:
    return [states[run.prefixes, :, : run.length] for states in prefix]


def _expand_mask(query: Tensor, run: PrefixRun) -> Tensor | None:
    return None if run.mask is None else run.mask.to(query.dtype).expand(-1, 1, run.members * query.shape[2], -1)


@cache
def is_kernel_exact() -> bool:
    """Returns True if this torch has the kernel, with grouped heads, and it computes the formula above.

    The kernel has no public name, so it is tried on a few numbers, once per process.
    """
    return is_attention_correct(flash_attention)


def is_attention_correct(attend: Callable[..., Tensor]) -> bool:
    """Returns True if a function computes what `flash_attention` documents, gradients included; else logs why not."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 4, 5, 8), (4, 2, 5, 8), (4, 2, 5, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        copies = [states.detach().clone().requires_grad_() for states in inputs]
        query, key, value, prefix_keys, prefix_values = inputs
        runs = find_prefix_runs([0, 0, 1, 1], [3, 2])
        try:
            found = attend(query, key, value, 0.3, (prefix_keys, prefix_values), runs)
            (found * found).sum().backward()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as cause:
            logger.info("using transformers' attention (slower): torch's flash kernel for CPUs failed: %s", cause)
            return False
        expected = _compute_reference(*copies)
        (expected * expected).sum().backward()
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(inputs, copies, strict=True))]
    exact = all(a is not None and b is not None and torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    if not exact:
        logger.info("using transformers' attention (slower): torch's flash kernel for CPUs gives different results")
    return exact


def _compute_reference(query: Tensor, key: Tensor, value: Tensor, prefix_keys: Tensor, prefix_values: Tensor) -> Tensor:
    """Returns the attention of four rows with two prefixes, written out."""
    keys, values = (
        torch.cat((states.repeat_interleave(2, 0), own), dim=2).repeat_interleave(2, 1)
        for states, own in ((prefix_keys, key), (prefix_values, value))
    )
    seen = torch.ones(4, 1, 5, 8).tril(3)
    seen[2:, :, :, 2] = 0  # the second prefix has two tokens
    return (((query @ keys.transpose(-1, -2)) * 0.3 + seen.log()).softmax(-1) @ values).transpose(1, 2)
