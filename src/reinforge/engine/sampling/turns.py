"""Turns of one thread: the sampler's steps between the micro-batches of a job.

micro-batch 0.2 s │ sampling, up to 0.2 s │ micro-batch 0.2 s │ nothing to sample │ micro-batch ...

Where the agents wait for a tool, the job has the thread to itself; where both have work, each gets half of it. A
second thread would have a pool of as many workers as there are cores, too, and the two pools slow each other down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reinforge.engine.sampling.sampler import ReplySampler


class SamplerTurns:
    """Lets the sampler work as long as a computation has just taken; called in the sampler's thread, between its parts.

    Args:
        sampler: Samples from weights that the computation does not change.
        clock: Returns seconds.
    """

    def __init__(self, sampler: ReplySampler, clock: Callable[[], float] = time.monotonic):
        self._sampler, self._clock = sampler, clock
        self._since_s: float | None = None

    @contextmanager
    def share_thread(self) -> Iterator[None]:
        """Measures the computation inside the block, which may give the sampler turns."""
        before, self._since_s = self._since_s, self._clock()
        try:
            yield
        finally:
            self._since_s = before

    def __call__(self) -> None:
        """Gives the sampler its turn; does nothing outside `share_thread`."""
        if self._since_s is not None:
            self._sampler.run_for(self._clock() - self._since_s)
            self._since_s = self._clock()
