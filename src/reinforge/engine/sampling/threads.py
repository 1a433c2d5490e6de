"""The number of threads that sampling uses: all, or one less while agents keep a core busy.

An operation split over all cores is as slow as its slowest part. Where agents occupy one of the cores, that part waits
for its turn: on two cores a decode step then took 14 to 29 ms instead of 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BUSY_SHARE = 0.35  # from this share of its time on, an agent's thread counts as busy

MIN_INTERVAL_S = 0.02  # minimum time over which the share is measured


class ThreadLoad:
    """Measures the share of its time that one thread computes; every call must come from that thread.

    Args:
        wall: Returns the time in seconds.
        computed: Returns the seconds that the calling thread has computed.

    Attributes:
        share: The share between the last two measurements that were far enough apart, in [0, 1].
    """

    def __init__(self, wall: Callable[[], float] = time.monotonic, computed: Callable[[], float] = time.thread_time):
        self.share, self._wall, self._computed = 0.0, wall, computed
        self._wall_s, self._computed_s = wall(), computed()

    def measure(self) -> float:
        """Returns the share, measured again if enough time has passed since the last measurement."""
        wall_s = self._wall()
        if wall_s - self._wall_s >= MIN_INTERVAL_S:
            computed_s = self._computed()
            self.share = (computed_s - self._computed_s) / (wall_s - self._wall_s)
            self._wall_s, self._computed_s = wall_s, computed_s
        return self.share


@contextmanager
def leave_core_to_agents(load: float, *, enabled: bool = True) -> Iterator[None]:
    """Makes torch use one thread less inside the block if agents are busy and there are several threads.

    Args:
        load: Share of its time that an agent's thread computes.
    """
    threads = torch.get_num_threads()
    if not enabled or load < BUSY_SHARE or threads < 2:
        yield
        return
    torch.set_num_threads(threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
