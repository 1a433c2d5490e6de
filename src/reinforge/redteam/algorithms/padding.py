"""Per-token numbers as lists (in steps) and as padded tensors (in batches).

Shapes: B probes, T tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reinforge.errors import EngineError


def unpad_row(values_BT: Tensor, mask_BT: Tensor, row: int) -> list[float]:
    """Returns the numbers of one row without its padding.

    Example: values [0, -1, -2, 0], mask [0, 1, 1, 0] -> [-1, -2].
    """
    return values_BT[row][mask_BT[row]].tolist()


def find_begin(mask_BT: Tensor, row: int) -> int:
    """Returns the column of a row's first token; 0 if it has none."""
    return int(mask_BT[row].long().argmax())


def pad_rows(rows: Sequence[Sequence[float]], begins: Sequence[int], mask_BT: Tensor, like_BT: Tensor) -> Tensor:
    """Returns lists as one tensor `[B, T]`: each list begins at the first token of its row, and the rest is 0.

    Example: [[-1, -2], [-3]] with mask [[0, 1, 1], [1, 0, 0]] -> [[0, -1, -2], [-3, 0, 0]].

    Args:
        rows: One list for each row, recorded when its probe was sampled.
        begins: The column at which each list began then. It counts where the row has another number of tokens now,
            which is so if the probability of a first or last token has become exactly 1.
        mask_BT: True where a row has a token now.
        like_BT: Gives dtype and device.

    Raises:
        EngineError: A list does not fit into its row.
    """
    padded_BT = torch.zeros(mask_BT.shape, dtype=like_BT.dtype, device=like_BT.device)
    counts = mask_BT.sum(dim=1).tolist()
    for i, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        first = find_begin(mask_BT, i) if counts[i] == len(row) else begin
        if first + len(row) > mask_BT.shape[1]:
            raise EngineError(
                f"a probe had {len(row)} tokens from column {begin} on when it was sampled, but now its row has "
                f"{counts[i]} tokens in {mask_BT.shape[1]} columns; return the same tokens of a probe every time"
            )
        padded_BT[i, first : first + len(row)] = padded_BT.new_tensor(list(row))
    return padded_BT
