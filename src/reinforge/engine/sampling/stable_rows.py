"""Finds how many rows a decode step needs, so that the bits of a row do not depend on the number of rows.

A BLAS library picks its kernel by the shape of a product, and the kernels for few rows add up in another order. From
which number of rows on the kernel stays the same differs by CPU and by inner size. Measured with MKL in float32: 4 rows
were enough on one CPU; another one (AVX-512, AMX) needs 3 rows for 64 inputs, 6 for 128, 9 for 192, 16 for 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.sampling.kv_cache import MIN_ROWS
from reinforge.engine.sampling.projection import multiply, pack

CHECKED_ROWS = 40
"""Up to here every number of rows is tried, beyond it every eighth."""


@torch.no_grad()
def find_stable_rows(model: CausalModel, max_rows: int) -> int:
    """Returns the smallest number of rows from which every product of the model gives a row the same bits.

    Args:
        model: The model; one layer of each shape is tried.
        max_rows: Rows of a full batch; returned if no smaller number works, so that every step has exactly this many.
    """
    before, stable = torch.get_num_threads(), min(MIN_ROWS, max_rows)
    torch.set_num_threads(1)  # on several threads a product is also divided by its number of rows
    try:
        for size, compute in _iterate_products(model):
            rows = torch.linspace(-1, 1, max_rows * size, device=model.device).view(max_rows, size).to(model.dtype)
            whole = compute(rows)
            each, eighth = range(stable, min(max_rows, CHECKED_ROWS)), range(max(stable, CHECKED_ROWS), max_rows, 8)
            counts = [*each, *eighth, max_rows]
            for count, following in pairwise(counts):
                if not torch.equal(compute(rows[:count]), whole[:count]):
                    stable = following
    finally:
        torch.set_num_threads(before)
    return stable


def _iterate_products(model: CausalModel) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Yields the input size and the product of one layer of each shape, packed and plain, as decode steps use it."""
    seen: set[tuple[int, ...]] = set()
    for layer in model.module.modules():
        if not isinstance(layer, nn.Linear | Conv1D) or tuple(layer.weight.shape) in seen:
            continue
        seen.add(tuple(layer.weight.shape))
        yield (layer.in_features if isinstance(layer, nn.Linear) else layer.nx), layer
        if type(layer) is nn.Linear:
            yield layer.in_features, partial(multiply, weight=pack(layer.weight.detach()), bias=None)
