"""Keys and values of conversations between their turns: the next turn computes only what is new in its prompt.

    first turn    prompt a b c      reply d e     kept: a b c d  (e was drawn, but never fed)
    second turn   prompt a b c d e f g            a b c d are copied back, e f g are computed

What counts is the longest beginning that a prompt has in common with anything kept, so branches of a tree go on from
one node, conversations share what they all begin with, and a history that a template rewrites is used up to there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reinforge.engine.model.causal_model import DEFAULT

TokenIds = tuple[int, ...]
Key = tuple[str, TokenIds]

MIN_KEPT = 32
"""Shorter sequences are not kept: computing them again costs about what copying them out and back does."""

MIN_REUSED = 16
"""Fewer common tokens are computed with the rest of the prompt."""

MIN_SHARE = 4
"""So are those that are less than one in so many: a token behind a kept sequence costs a seventh more to read."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSequence:
    """One sequence's keys and values.

    Attributes:
        token_ids: T tokens.
        states: `[H, T, D]` keys, then values, of each layer in turn.
        adapter: Whose they are.
    """

    token_ids: TokenIds
    states: Sequence[Tensor]
    adapter: str = DEFAULT

    @property
    def num_bytes(self) -> int:
        """Memory that the keys and values take."""
        return sum(states.numel() * states.element_size() for states in self.states)


class Conversations:
    """What is kept, by adapter; the least recently used goes first. All of it belongs to the weights as they are.

    No kept sequence begins another: `keep` drops what the new one begins with. Among sequences in order, what has
    most in common with a prompt then stands next to where the prompt would stand.

    Args:
        max_bytes: Most memory of keys and values; 0: nothing is ever kept.

    Attributes:
        num_bytes: Memory that is taken.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._by_use: OrderedDict[Key, KeptSequence] = OrderedDict()
        self._in_order: list[Key] = []

    def __len__(self) -> int:
        return len(self._in_order)

    def find(self, prompt: TokenIds, adapter: str = DEFAULT) -> tuple[KeptSequence, int] | None:
        """Returns the sequence that has most in common with a prompt, and how many tokens; None: not worth it.

        The prompt's last token is never among them: the reply's first token is drawn from its features.

        Example: kept 1..40 and 1..20 60..90, prompt 1..20 60..75 -> the second, 35.
        """
        if len(prompt) <= MIN_REUSED or not self._in_order:
            return None
        place = bisect_left(self._in_order, (adapter, prompt))
        near = [key for key in self._in_order[max(0, place - 1) : place + 1] if key[0] == adapter]
        common, best = max(((common_length(key[1], prompt), key) for key in near), default=(0, (adapter, prompt)))
        common = min(common, len(prompt) - 1)
        if common < MIN_REUSED or common * MIN_SHARE < len(prompt):
            return None
        self._by_use.move_to_end(best)
        return self._by_use[best], common

    def wants(self, token_ids: TokenIds, adapter: str = DEFAULT) -> bool:
        """Returns False for what is too short, or begins a sequence that is kept already."""
        if len(token_ids) < MIN_KEPT or not self.max_bytes:
            return False
        place = bisect_left(self._in_order, (adapter, token_ids))
        if place < len(self._in_order) and begins((adapter, token_ids), self._in_order[place]):
            self._by_use.move_to_end(self._in_order[place])
            return False
        return True

    def keep(self, sequence: KeptSequence) -> None:
        """Keeps a sequence that is wanted, in place of one that it goes on from; others make room for it."""
        size, key = sequence.num_bytes, (sequence.adapter, sequence.token_ids)
        if size > self.max_bytes:
            return
        place = bisect_left(self._in_order, key)
        if place and begins(self._in_order[place - 1], key):
            self._drop(self._in_order[place - 1])
        while self.num_bytes + size > self.max_bytes:
            self._drop(next(iter(self._by_use)))
        insort(self._in_order, key)
        self._by_use[key] = sequence
        self.num_bytes += size

    def clear(self, adapter: str | None = None) -> None:
        """Drops what an adapter keeps; None: everything."""
        for key in [key for key in self._in_order if adapter in (None, key[0])]:
            self._drop(key)

    def halve(self) -> None:
        """Drops everything, and takes at most half of the memory that it took from now on."""
        self.max_bytes = self.num_bytes // 2
        self.clear()

    def _drop(self, key: Key) -> None:
        del self._in_order[bisect_left(self._in_order, key)]
        self.num_bytes -= self._by_use.pop(key).num_bytes


def begins(first: Key, second: Key) -> bool:
    """Returns True if the second is the same adapter's and its tokens begin with the first's."""
    return first[0] == second[0] and second[1][: len(first[1])] == first[1]


def common_length(first: TokenIds, second: TokenIds) -> int:
    """Returns how many tokens two sequences begin with alike.

    Example: 1 2 3 4 and 1 2 5 -> 2.
    """
    length = min(len(first), len(second))
    differs = np.fromiter(first[:length], np.int64, length) != np.fromiter(second[:length], np.int64, length)
    return int(differs.argmax()) if differs.any() else length
