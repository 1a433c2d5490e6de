"""How many threads sampling takes: all, or all but one while agents keep a core busy.

A product that is cut for all cores ends with its slowest part. Where a thread of agents has one of the cores, that part
waits for its turn: on two cores a decode step then took 14 to 29 ms instead of 5 (docs/lab-notes.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BUSY = 0.35
"""Share of its time that a thread of agents computes, from which on it is left a core."""

LEAST_S = 0.02
"""Time over which the share is measured, at least."""


class Load:
    """What share of its time one thread computes; every call comes from that thread.

    Args:
        wall: Returns seconds.
        computed: Returns seconds that the calling thread has computed.

    Attributes:
        share: As it was over the last two looks that were far enough apart, in [0, 1].
    """

    def __init__(self, wall: Callable[[], float] = time.monotonic, computed: Callable[[], float] = time.thread_time):
        self.share, self._wall, self._computed = 0.0, wall, computed
        self._wall_s, self._computed_s = wall(), computed()

    def look(self) -> float:
        """Measures the share, if there was time enough since the last look, and returns it."""
        wall_s = self._wall()
        if wall_s - self._wall_s >= LEAST_S:
            computed_s = self._computed()
            self.share = (computed_s - self._computed_s) / (wall_s - self._wall_s)
            self._wall_s, self._computed_s = wall_s, computed_s
        return self.share


@contextmanager
def sampling_threads(load: float) -> Iterator[None]:
    """Within, torch's operations take one thread less, if agents are busy and there are several.

    Args:
        load: Share of its time that a thread of agents computes.
    """
    threads = torch.get_num_threads()
    if load < BUSY or threads < 2:
        yield
        return
    torch.set_num_threads(threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
