"""The words that a token was drawn from, where top-p, top-k or min-p left some out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_SUPPORT = 1024
"""Words of the widest support that is recorded; a token drawn from a wider one is not trained."""


@dataclass(frozen=True, slots=True)
class Supports:
    """The support of each token of a row: its sets of words, one after the other, each in rising order.

    Kept as the bytes of int32 arrays: 4 bytes a word, equal where the words are, the same in every process.

    Example: tokens drawn from {4, 9}, from every word, and from {7} -> `counts [2, 0, 1]`, `token_ids [4, 9, 7]`.

    Attributes:
        packed_counts: Words of each token's set; 0: every word, or more than are recorded.
        packed_token_ids: The words.
    """

    packed_counts: bytes
    packed_token_ids: bytes

    @classmethod
    def of(cls, sets: Iterable[NDArray[np.int32]]) -> Supports:
        """Returns the supports of a row's tokens; an empty array stands for every word."""
        arrays = [np.asarray(words, np.int32) for words in sets]
        counts = np.array([len(words) for words in arrays], np.int32)
        return cls(counts.tobytes(), np.concatenate(arrays).tobytes() if arrays else b"")

    @property
    def counts(self) -> NDArray[np.int32]:
        """Words of each token's set, `[T]`; 0: every word, or more than are recorded."""
        return np.frombuffer(self.packed_counts, np.int32)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The words of all sets."""
        return np.frombuffer(self.packed_token_ids, np.int32)

    @property
    def sets(self) -> list[NDArray[np.int32]]:
        """Each token's words."""
        words, ends = self.token_ids, [0, *np.cumsum(self.counts).tolist()]
        return [words[start:end] for start, end in pairwise(ends)]

    def __len__(self) -> int:
        return len(self.packed_counts) // 4
