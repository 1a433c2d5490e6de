"""The prefix cache: keys and values of earlier turns, so that the next turn computes only the new part of its prompt.

    first turn    prompt a b c      reply d e     cached: a b c d  (e was sampled, but never fed to the model)
    second turn   prompt a b c d e f g            a b c d are copied back, e f g are computed

A prompt uses the longest prefix that it shares with any cached sequence. So the branches of a tree continue from one
node, conversations share their common start, and a history that a template rewrites is used up to the first change.

Models with states (`model_cache.py`) can only continue a whole sequence, so the next turn of a conversation and the
branches at the end of a cached sequence do; a history that a template rewrites is computed again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reinforge.engine.model.causal_model import DEFAULT_ADAPTER

TokenIds = tuple[int, ...]
Key = tuple[str, TokenIds]

MIN_CACHED_TOKENS = 32
"""Shorter sequences are not cached: computing them again costs about what copying them out and back does."""

MIN_REUSED_TOKENS = 16  # shorter prefixes are not reused, but computed with the rest of the prompt

MIN_REUSED_SHARE = 1 / 4
"""Nor are prefixes that are a smaller share of the prompt: a token after a cached prefix costs a seventh more."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """Keys, values and states of one sequence."""

    token_ids: TokenIds  # T tokens
    states: Sequence[Tensor]  # `[H, T, D]` keys, then values, of each layer; then its states after the last token
    adapter: str = DEFAULT_ADAPTER  # the adapter that computed them

    @property
    def num_bytes(self) -> int:
        return sum(states.numel() * states.element_size() for states in self.states)


class PrefixCache:
    """Cached sequences by adapter, all computed by the current weights; the least recently used is evicted first.

    No cached sequence is a prefix of another: `add` drops the one that the new sequence extends. In sorted order, the
    sequence that shares most with a prompt is then next to where the prompt would be inserted.

    Args:
        max_bytes: Maximum memory of keys, values and states; 0: nothing is cached.
        whole_only: True if a sequence can only be continued from its end; prefixes of other sequences are then kept.

    Attributes:
        num_bytes: Memory in use.
    """

    def __init__(self, max_bytes: int, *, whole_only: bool = False):
        self.max_bytes, self.num_bytes, self.whole_only = max_bytes, 0, whole_only
        self._by_use: OrderedDict[Key, CachedPrefix] = OrderedDict()
        self._sorted: list[Key] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def find(self, prompt: TokenIds, adapter: str = DEFAULT_ADAPTER) -> tuple[CachedPrefix, int] | None:
        """Returns the sequence that shares the most tokens with a prompt, and how many; None: too few to reuse.

        The prompt's last token is never among them: the reply's first token is sampled from its features.

        Example: cached 1..40 and 1..20 60..90, prompt 1..20 60..75 -> the second, 35.
        """
        if len(prompt) <= MIN_REUSED_TOKENS or not self._sorted:
            return None
        if self.whole_only:
            common, best = self._find_whole((adapter, prompt[:-1]))
        else:
            common, best = self._find_nearest((adapter, prompt))
        common = min(common, len(prompt) - 1)
        if common < MIN_REUSED_TOKENS or common < len(prompt) * MIN_REUSED_SHARE:
            return None
        self._by_use.move_to_end(best)
        return self._by_use[best], common

    def _find_nearest(self, key: Key) -> tuple[int, Key]:
        """Returns how many tokens a prompt shares with the sequence that shares most, and that sequence."""
        adapter, prompt = key
        place = bisect_left(self._sorted, key)
        near = [key for key in self._sorted[max(0, place - 1) : place + 1] if key[0] == adapter]
        return max(((count_common_tokens(each[1], prompt), each) for each in near), default=(0, key))

    def _find_whole(self, key: Key) -> tuple[int, Key]:
        """Returns the length of the longest sequence that a prompt starts with, 0 if there is none, and the sequence.

        Sequences that sort between a prefix of the prompt and the prompt share at least that prefix with it, so each
        look-up leaves a shorter beginning of the prompt to search for.
        """
        adapter, start = key
        while start:
            place = bisect_right(self._sorted, (adapter, start))
            if not place or self._sorted[place - 1][0] != adapter:
                break
            found = self._sorted[place - 1][1]
            common = count_common_tokens(found, start)
            if common == len(found):
                return common, self._sorted[place - 1]
            start = start[:common]
        return 0, key

    def accepts(self, token_ids: TokenIds, adapter: str = DEFAULT_ADAPTER) -> bool:
        """Returns False for a sequence that is too short, that is cached, or that is a prefix of a cached one."""
        if len(token_ids) < MIN_CACHED_TOKENS or not self.max_bytes:
            return False
        place = bisect_left(self._sorted, (adapter, token_ids))
        is_covered = is_prefix if not self.whole_only else tuple.__eq__
        if place < len(self._sorted) and is_covered((adapter, token_ids), self._sorted[place]):
            self._by_use.move_to_end(self._sorted[place])
            return False
        return True

    def add(self, sequence: CachedPrefix) -> None:
        """Caches an accepted sequence in place of the one that it extends; evicts others to make room."""
        size, key = sequence.num_bytes, (sequence.adapter, sequence.token_ids)
        if size > self.max_bytes:
            return
        place = bisect_left(self._sorted, key)
        if place and not self.whole_only and is_prefix(self._sorted[place - 1], key):
            self._drop(self._sorted[place - 1])
        while self.num_bytes + size > self.max_bytes:
            self._drop(next(iter(self._by_use)))
        insort(self._sorted, key)
        self._by_use[key] = sequence
        self.num_bytes += size

    def clear(self, adapter: str | None = None) -> None:
        for key in [key for key in self._sorted if adapter in (None, key[0])]:
            self._drop(key)

    def halve(self) -> None:
        """Drops everything, and from now on uses at most half of the memory that was in use."""
        self.max_bytes = self.num_bytes // 2
        self.clear()

    def _drop(self, key: Key) -> None:
        del self._sorted[bisect_left(self._sorted, key)]
        self.num_bytes -= self._by_use.pop(key).num_bytes


def is_prefix(first: Key, second: Key) -> bool:
    """Returns True if both have the same adapter and the second's tokens start with the first's."""
    return first[0] == second[0] and second[1][: len(first[1])] == first[1]


def count_common_tokens(first: TokenIds, second: TokenIds) -> int:
    """Returns the length of the longest common prefix of two sequences.

    Example: 1 2 3 4 and 1 2 5 -> 2.
    """
    length = min(len(first), len(second))
    differs = np.fromiter(first[:length], np.int64, length) != np.fromiter(second[:length], np.int64, length)
    return int(differs.argmax()) if differs.any() else length
