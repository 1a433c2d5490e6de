"""The tokens that each position was sampled from: the support of the sampling distribution.

Top-p, top-k and min-p keep few tokens, which are stored as ids. A grammar or a banned token may keep tens of thousands,
which are stored as one bit per token of the vocabulary; the positions of a reply share few different bit sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_SUPPORT = 1024  # maximum number of kept tokens to record for a sampling filter; a position with more is not trained

Support = NDArray[np.int32] | bytes
"""The kept tokens of one position: their sorted ids, or one bit per token of the vocabulary, the lowest id first."""


@dataclass(frozen=True, slots=True)
class Supports:
    """The kept tokens of each position of a sequence: sorted sets of token ids, concatenated, or bits.

    Stored as the bytes of int32 arrays: 4 bytes per token id, comparable with `==`, the same in every process.

    Example: kept tokens {4, 9}, then all, then {7} -> `counts [2, 0, 1]`, `token_ids [4, 9, 7]`.
    Example: kept tokens {0, 2, 3} as bits, then {1} as ids, then the same bits -> `counts [-1, 1, -1]`,
        `token_ids [1]`, `masks (0b1101,)`.
    """

    packed_counts: bytes
    """Number of kept tokens per position; 0: all, or more than are recorded; -k: those whose bits are set in `masks[k -
    1]`."""
    packed_token_ids: bytes
    masks: tuple[bytes, ...] = ()  # the different bit sets of the sequence, all of the same length

    @classmethod
    def from_sets(cls, sets: Iterable[Support]) -> Supports:
        """Returns the supports of a sequence from one set per position; an empty array stands for all tokens."""
        counts: list[int] = []
        arrays: list[NDArray[np.int32]] = []
        places: dict[bytes, int] = {}
        for kept in sets:
            if isinstance(kept, bytes):
                counts.append(-1 - places.setdefault(kept, len(places)))
            else:
                counts.append(len(kept))
                arrays.append(np.asarray(kept, np.int32))
        token_ids = np.concatenate(arrays).tobytes() if arrays else b""
        return cls(np.array(counts, np.int32).tobytes(), token_ids, tuple(places))

    @property
    def counts(self) -> NDArray[np.int32]:
        """Number of kept tokens per position, `[T]`; 0: all, or more than are recorded; -k: those of `masks[k - 1]`."""
        return np.frombuffer(self.packed_counts, np.int32)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The kept token ids of all positions without bits."""
        return np.frombuffer(self.packed_token_ids, np.int32)

    @property
    def sets(self) -> list[Support]:
        """The kept tokens of each position."""
        token_ids, counts = self.token_ids, self.counts.tolist()
        ends = [0, *np.maximum(self.counts, 0).cumsum().tolist()]
        return [
            self.masks[-1 - count] if count < 0 else token_ids[start:end]
            for count, (start, end) in zip(counts, pairwise(ends), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.packed_counts) // 4


def unpack_mask(mask: bytes) -> NDArray[np.int32]:
    """Returns the sorted token ids whose bits are set: 0b1101 -> [0, 2, 3]."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)
