"""Per-token numbers as lists (in steps) and as padded tensors (in batches).

Shapes: B probes, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unpad_row(values_BT: Tensor, mask_BT: Tensor, row: int) -> list[float]:
    """Returns the numbers of one row without its padding.

    Example: values [-1, -2, 0], mask [1, 1, 0] -> [-1, -2].
    """
    return values_BT[row][mask_BT[row]].tolist()


def pad_rows(rows: Sequence[Sequence[float]], like_BT: Tensor) -> Tensor:
    """Returns lists as one tensor `[B, T]`, padded with zeros, with the shape, dtype and device of another tensor.

    Example: [[-1, -2], [-3]] and `like` of shape [2, 3] -> [[-1, -2, 0], [-3, 0, 0]].
    """
    padded_BT = torch.zeros(like_BT.shape, dtype=like_BT.dtype, device=like_BT.device)
    for target_T, row in zip(padded_BT, rows, strict=True):
        target_T[: len(row)] = target_T.new_tensor(list(row))
    return padded_BT
