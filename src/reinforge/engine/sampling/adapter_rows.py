"""The order in which a decode step multiplies the rows of a batch: those of one adapter together.

    adapters of rows 0, 1, 2: verifier, prover, verifier     order [1, 0, 2], counts [1, 2] of prover and verifier

Weights multiply all rows at once, and each adapter only its own, which are a slice then. So another adapter's numbers
never touch a row, finite or not, and an adapter without a row costs nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdapterRows(NamedTuple):
    """Rows in the order of their adapters.

    Attributes:
        order: The row of the batch at each place of the order; None: the batch is in this order.
        places: The place of each row of the batch.
        counts: Rows of each adapter.
        min_rows: Each adapter multiplies at least this many rows, and the results of rows that are not its own are
            dropped: with fewer rows, the last bit of a product depends on their number.
    """

    order: Tensor | None
    places: Tensor | None
    counts: list[int]
    min_rows: int


def order_rows(names: Sequence[str], device: torch.device, min_rows: int) -> tuple[tuple[str, ...], AdapterRows]:
    """Returns the adapters of a batch, and the rows of each.

    Args:
        device: The model's.
    """
    adapters = tuple(sorted(set(names)))
    if len(adapters) == 1:
        return adapters, AdapterRows(None, None, [len(names)], min_rows)
    order = torch.tensor(sorted(range(len(names)), key=names.__getitem__))
    counts = [names.count(name) for name in adapters]
    return adapters, AdapterRows(order.to(device), order.argsort().to(device), counts, min_rows)


def pick_rows(states: Tensor, indices: Tensor | None) -> Tensor:
    """Returns these rows of a tensor, or all for None; compiled by TorchScript, too."""
    return states if indices is None else states.index_select(0, indices)
