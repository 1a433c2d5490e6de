"""Which requests begin next: clients take turns, arrivals are gathered, and a paused adapter's requests wait."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from reinforge.engine.sampling.running_batch import SampleRequest

GATHERED_PART, MAX_HELD_STEPS = 4, 4  # requests wait until they are a fourth of the running replies, or for four steps


class AdmissionQueue:
    """The requests that wait for a slot.

    Args:
        condition: Its lock protects this object; it is notified where the sampler may have something to do.
        max_num_seqs: Number of slots.
    """

    def __init__(self, condition: threading.Condition, max_num_seqs: int):
        self._condition, self._max_num_seqs = condition, max_num_seqs
        self.paused: set[str] = set()  # adapters whose requests wait
        self._waiting: deque[SampleRequest] = deque()
        self._last_s: dict[int, float] = {}  # when a reply of each client began last
        self._held_steps = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, requests: Iterable[SampleRequest]) -> None:
        with self._condition:
            self._waiting.extend(requests)
            self._condition.notify_all()

    def pause(self, adapter: str) -> None:
        with self._condition:
            self.paused.add(adapter)

    def resume(self, adapter: str) -> None:
        with self._condition:
            self.paused.discard(adapter)
            self._condition.notify_all()

    def has_waiting(self, adapter: str) -> bool:
        with self._condition:
            return any(request.adapter == adapter for request in self._waiting)

    def count_ready(self) -> int:
        with self._condition:
            if not self.paused:
                return len(self._waiting)
            return sum(request.adapter not in self.paused for request in self._waiting)

    def remove(self, adapter: str | None = None) -> list[SampleRequest]:
        """Removes an adapter's requests, or all, and returns them."""
        with self._condition:
            removed = [request for request in self._waiting if adapter in (None, request.adapter)]
            self._waiting = deque(request for request in self._waiting if adapter not in (None, request.adapter))
        return removed

    def holds_back(self, num_running: int, num_begun: int) -> bool:
        """Returns True while the few requests that could begin should wait for others.

        A prompt that is computed alone costs as much as a decode step of all replies, or more: the weights are read
        either way. So arrivals are gathered until they are a share of the running batch, for a few steps at most.
        """
        num_ready = min(self.count_ready(), self._max_num_seqs - num_begun)
        if GATHERED_PART * num_ready >= num_running:
            self._held_steps = 0
        elif num_ready > 0:
            self._held_steps = (self._held_steps + 1) % (MAX_HELD_STEPS + 1)
        return self._held_steps > 0

    def pop(self, begun: Sequence[SampleRequest], versions: Mapping[str, int]) -> list[SampleRequest]:
        """Returns the requests to begin now, as many as there are free slots, with the versions that sample them."""
        popped: list[SampleRequest] = []
        held: list[SampleRequest] = []
        if len(begun) >= self._max_num_seqs:
            return popped
        with self._condition:
            clients = {request.client for request in self._waiting}
            self._last_s = {client: last_s for client, last_s in self._last_s.items() if client in clients}
            if len(clients) > 1:
                self._waiting = deque(take_turns(self._waiting, begun, self._last_s))
            while self._waiting and len(begun) + len(popped) < self._max_num_seqs:
                request = self._waiting.popleft()
                if request.adapter in self.paused:
                    held.append(request)
                elif not request.cancelled:
                    request.version = versions[request.adapter]
                    self._last_s[request.client] = time.monotonic()
                    popped.append(request)
            self._waiting.extendleft(reversed(held))
        return popped


def take_turns(
    waiting: Iterable[SampleRequest], begun: Iterable[SampleRequest], last_s: Mapping[int, float]
) -> list[SampleRequest]:
    """Returns waiting requests in the order in which they begin: a client with fewer replies in flight comes first.

    Example: clients a a a b wait, and a has a reply in flight -> b a a a.

    Args:
        last_s: When a reply of each client began last; among equals, the client with the earliest one comes first.
    """
    counts = Counter(request.client for request in begun)
    ranked = list[tuple[int, float, SampleRequest]]()
    for request in waiting:
        ranked.append((counts[request.client], last_s.get(request.client, 0.0), request))
        counts[request.client] += 1
    return [request for *_, request in sorted(ranked, key=lambda each: each[:2])]
