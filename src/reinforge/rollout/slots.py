"""The limit of episodes in flight: those that training waits for come first.

validation of the published version  →  epoch 3, which trains next  →  epoch 4, collected ahead
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

from reinforge.types.episode import EpisodeKey


class EpisodeSlots:
    """A semaphore that admits waiting episodes by epoch, and within an epoch in the order in which they came."""

    def __init__(self, num_slots: int):
        self._num_free = num_slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def acquire(self, key: EpisodeKey) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        place = key.epoch if key.phase == "collect" else -1
        heapq.heappush(self._waiting, (place, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given the slot, too
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
