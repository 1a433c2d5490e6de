"""Attention of rows over themselves and over a prefix that they share, by torch's flash kernel for CPUs.

By its times the kernel skips no later key within 512, so queries go to it in chunks with the keys up to their end.
Queries of rows with the same prefix go to it side by side, over keys and values that are there once. The two parts are
joined by their log-sum-exps, and the kernel's backward pass, given the joined output and log-sum-exp, returns each
part's gradient (as blocks do in Ring Attention, arXiv:2310.01889).
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

QUERIES = 96
"""Queries of a chunk; as many as twice that go at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that stand side by side, as many for each of their prefixes, which do too.

    Attributes:
        rows, prefixes: Where they stand.
        members: Rows of a prefix, m.
        length: Of the longest prefix.
        mask: Added to the scores of shorter ones, `[G, 1, 1, P]`; None: all are equally long.
    """

    rows: slice
    prefixes: slice
    members: int
    length: int
    mask: Tensor | None = None


def runs_of(groups: Sequence[int], lengths: Sequence[int]) -> list[Run] | None:
    """Returns the runs of rows, or None where rows of one prefix do not stand side by side.

    Example: prefixes 0 0 1 1 2 of the rows -> rows 0 to 4 with 2 members each, row 4 with 1.

    Args:
        groups: Prefix of each row.
        lengths: Tokens of each prefix.
    """
    if list(groups) != sorted(groups) or set(groups) != set(range(len(lengths))):
        return None
    runs: list[Run] = []
    for members, some in groupby(range(len(lengths)), key=Counter(groups).__getitem__):
        prefixes = list(some)
        first = runs[-1].rows.stop if runs else 0
        its = torch.tensor(lengths[prefixes[0] : prefixes[-1] + 1])
        length = int(its.max())
        unseen = torch.arange(length) >= its[:, None]
        mask = torch.where(unseen, -torch.inf, 0.0)[:, None, None] if unseen.any() else None
        rows = slice(first, first + members * len(prefixes))
        runs.append(Run(rows, slice(prefixes[0], prefixes[-1] + 1), members, length, mask))
    return runs


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    runs: Sequence[Run] = (),
) -> Tensor:
    """Returns softmax(q k^T scale) v over the keys up to each query and over all of its prefix, `[B, S, H, D]`.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, K, S, D]`.
        value: `[B, K, S, D]`.
        scale: Factor of the scores.
        prefix: Keys and values, `[G, K, P, D]` each.
        runs: Which rows have which prefix.
    """
    output = _Attention.apply(query, key, value, scale, () if prefix is None else runs, *(prefix or ()))
    return output.transpose(1, 2)


class _Attention(Function):
    """`(q, k, v, scale, runs, prefix keys, prefix values) -> [B, H, S, D]`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, runs: Sequence[Run], *prefix: Tensor
    ) -> Tensor:
        """Returns the attention; keeps it with its log-sum-exps and what it was given."""
        parts = [
            _FLASH(
                query[:, :, a:b], key[:, :, :b], value[:, :, :b], 0.0, a == 0, attn_mask=_mask(query, a, b), scale=scale
            )
            for a, b in _chunks(query.shape[2])
        ]
        output, sums = parts[0] if len(parts) == 1 else (_joined(column) for column in zip(*parts, strict=True))
        for run in runs:
            there, its_sums = _FLASH(
                _grouped(query, run), *_of(prefix, run), 0.0, False, attn_mask=_spread(query, run), scale=scale
            )
            there, its_sums = _ungrouped(there, run), _ungrouped(its_sums[..., None], run)[..., 0]
            own_sums = sums[run.rows]
            joined = torch.logaddexp(own_sums, its_sums)
            output[run.rows].mul_((own_sums - joined).exp_()[..., None])
            output[run.rows].addcmul_(there, (its_sums - joined).exp_()[..., None])
            own_sums.copy_(joined)
        ctx.scale, ctx.runs = scale, runs
        ctx.save_for_backward(query, key, value, output, sums, *prefix)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of queries, keys and values."""
        query, key, value, output, sums, *prefix = ctx.saved_tensors
        gradient, scale = gradients[0], ctx.scale
        to_queries: list[Tensor] = []
        to_keys: list[Tensor] = []
        for a, b in reversed(_chunks(query.shape[2])):  # the last one has a gradient for every key
            to_query, *found = _BACKWARD(
                gradient[:, :, a:b],
                query[:, :, a:b],
                key[:, :, :b],
                value[:, :, :b],
                output[:, :, a:b],
                sums[:, :, a:b],
                0.0,
                a == 0,
                attn_mask=_mask(query, a, b),
                scale=scale,
            )
            to_queries.append(to_query)
            to_keys = to_keys or found
            if to_keys is not found:
                for whole, part in zip(to_keys, found, strict=True):
                    whole[:, :, :b] += part
        of_query = to_queries[0] if len(to_queries) == 1 else _joined(to_queries[::-1])
        to_prefix = [torch.zeros_like(states) for states in prefix]
        for run in ctx.runs:
            to_query, *found = _BACKWARD(
                _grouped(gradient, run),
                _grouped(query, run),
                *_of(prefix, run),
                _grouped(output, run),
                _grouped(sums[..., None], run)[..., 0],
                0.0,
                False,
                attn_mask=_spread(query, run),
                scale=scale,
            )
            of_query[run.rows] += _ungrouped(to_query, run)
            for whole, part in zip(to_prefix, found, strict=True):
                whole[run.prefixes, :, : run.length] = part
        return of_query, *to_keys, None, None, *to_prefix


def _chunks(length: int) -> list[tuple[int, int]]:
    """Returns begin and end of each chunk of queries, all about as long.

    Example: 200 -> [(0, 67), (67, 133), (133, 200)]; 192 -> [(0, 192)].
    """
    count = 1 if length <= 2 * QUERIES else -(-length // QUERIES)
    return list(pairwise(round(length * i / count) for i in range(count + 1)))


def _mask(query: Tensor, start: int, end: int) -> Tensor | None:
    """Returns what lets queries from `start` on see the keys up to themselves; None: the kernel does that."""
    if start == 0:
        return None
    mask = torch.full((end - start, end), -torch.inf, dtype=query.dtype, device=query.device)
    return mask.triu_(start + 1).expand(len(query), 1, -1, -1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns chunks of queries behind each other, a query's heads side by side as the kernel has them."""
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


def _grouped(states: Tensor, run: Run) -> Tensor:
    """Returns the run's rows, `[G m, H, S, D]`, as `[G, H, m S, D]`; no copy where a token's heads are neighbours."""
    _, heads, length, size = states.shape
    return states[run.rows].transpose(1, 2).reshape(-1, run.members * length, heads, size).transpose(1, 2)


def _ungrouped(states: Tensor, run: Run) -> Tensor:
    """Returns `[G, H, m S, D]` as `[G m, H, S, D]`."""
    groups, heads, length, size = states.shape
    rows = states.transpose(1, 2).reshape(groups * run.members, length // run.members, heads, size)
    return rows.transpose(1, 2)


def _of(prefix: Sequence[Tensor], run: Run) -> list[Tensor]:
    return [states[run.prefixes, :, : run.length] for states in prefix]


def _spread(query: Tensor, run: Run) -> Tensor | None:
    return None if run.mask is None else run.mask.to(query.dtype).expand(-1, 1, run.members * query.shape[2], -1)


@cache
def is_exact() -> bool:
    """Returns True if this torch has the kernel, with heads that share keys, and it computes what is written above.

    It has no public name, so whether it does is asked of it, once in a process, on a few numbers.
    """
    return computes_attention(causal_attention)


def computes_attention(attend: Callable[..., Tensor]) -> bool:
    """Returns True if a function computes what `causal_attention` says, and its gradients; else says so in the log."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 4, 5, 8), (4, 2, 5, 8), (4, 2, 5, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
    with torch.inference_mode(False), torch.enable_grad():
        ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        theirs = [states.detach().clone().requires_grad_() for states in ours]
        query, key, value, first, its = ours
        try:
            found = attend(query, key, value, 0.3, (first, its), runs_of([0, 0, 1, 1], [3, 2]))
            (found * found).sum().backward()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as cause:
            logger.info("attention of whole rows is left to transformers, which is slower: %s", cause)
            return False
        wanted = _written_out(*theirs)
        (wanted * wanted).sum().backward()
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    exact = all(a is not None and b is not None and torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    if not exact:
        logger.info("attention of whole rows is left to transformers, which is slower: this torch computes another one")
    return exact


def _written_out(query: Tensor, key: Tensor, value: Tensor, first: Tensor, its: Tensor) -> Tensor:
    keys, values = (
        torch.cat((states.repeat_interleave(2, 0), own), dim=2).repeat_interleave(2, 1)
        for states, own in ((first, key), (its, value))
    )
    seen = torch.ones(4, 1, 5, 8).tril(3)
    seen[2:, :, :, 2] = 0  # the second prefix has two tokens
    return (((query @ keys.transpose(-1, -2)) * 0.3 + seen.log()).softmax(-1) @ values).transpose(1, 2)
