"""Numbers of each token between steps, which are lists, and batches, which are tensors.

Shapes: B rows, T tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def read_row(values_BT: Tensor, mask_BT: Tensor, row: int) -> list[float]:
    """Returns one row's numbers where it has tokens.

    Example: values [-1, -2, 0], mask [1, 1, 0] -> [-1, -2].
    """
    return values_BT[row][mask_BT[row]].tolist()


def as_rows(rows: Sequence[Sequence[float]], like_BT: Tensor) -> Tensor:
    """Returns rows as `[B, T]` with zeros behind their ends, of the shape and kind of another tensor.

    Example: [[-1, -2], [-3]] and `like` of shape [2, 3] -> [[-1, -2, 0], [-3, 0, 0]].
    """
    padded_BT = torch.zeros(like_BT.shape, dtype=like_BT.dtype, device=like_BT.device)
    for target_T, row in zip(padded_BT, rows, strict=True):
        target_T[: len(row)] = target_T.new_tensor(list(row))
    return padded_BT
