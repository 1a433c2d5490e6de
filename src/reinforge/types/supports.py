"""The tokens that top-p, top-k or min-p kept at each position: the support of the sampling distribution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_SUPPORT = 1024
"""Maximum number of kept tokens to record; a position with more is not trained."""


@dataclass(frozen=True, slots=True)
class Supports:
    """The kept tokens of each position of a sequence: sorted sets of token ids, concatenated.

    Stored as the bytes of int32 arrays: 4 bytes per token id, comparable with `==`, the same in every process.

    Example: kept tokens {4, 9}, then all, then {7} -> `counts [2, 0, 1]`, `token_ids [4, 9, 7]`.

    Attributes:
        packed_counts: Number of kept tokens per position; 0: all, or more than are recorded.
        packed_token_ids: The kept token ids.
    """

    packed_counts: bytes
    packed_token_ids: bytes

    @classmethod
    def from_sets(cls, sets: Iterable[NDArray[np.int32]]) -> Supports:
        """Returns the supports of a sequence from one set per position; an empty array stands for all tokens."""
        arrays = [np.asarray(token_ids, np.int32) for token_ids in sets]
        counts = np.array([len(token_ids) for token_ids in arrays], np.int32)
        return cls(counts.tobytes(), np.concatenate(arrays).tobytes() if arrays else b"")

    @property
    def counts(self) -> NDArray[np.int32]:
        """Number of kept tokens per position, `[T]`; 0: all, or more than are recorded."""
        return np.frombuffer(self.packed_counts, np.int32)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The kept token ids of all positions."""
        return np.frombuffer(self.packed_token_ids, np.int32)

    @property
    def sets(self) -> list[NDArray[np.int32]]:
        """The kept token ids of each position."""
        token_ids, ends = self.token_ids, [0, *np.cumsum(self.counts).tolist()]
        return [token_ids[start:end] for start, end in pairwise(ends)]

    def __len__(self) -> int:
        return len(self.packed_counts) // 4
