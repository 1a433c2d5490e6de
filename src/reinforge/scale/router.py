"""Which worker samples a reply: a conversation stays where its prefix is cached, a new one goes to the least busy."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable

from reinforge.types.request import ModelRequest

MAX_CONVERSATIONS = 65_536
"""Conversations whose worker is remembered; the oldest is forgotten first, which costs its cached prefix."""


def find_conversation(request: ModelRequest) -> str:
    """Returns a key that all turns of a conversation share, and its siblings, which begin with the same messages.

    Example: system S, user U, assistant A, user V -> the key of S and U, as of the first turn
    """
    first = next((i for i, each in enumerate(request.messages) if each.get("role") == "assistant"), None)
    start = [request.messages[:first], request.tools, request.prompt]
    return hashlib.sha256(json.dumps(start, sort_keys=True, default=str).encode()).hexdigest()


class Router:
    """Chooses workers by number; any number of threads may call it."""

    def __init__(self, workers: Iterable[int]):
        self._lock = threading.Lock()
        self._loads: Counter[int] = Counter(dict.fromkeys(workers, 0))
        self._places: OrderedDict[str, int] = OrderedDict()

    def acquire(self, key: str) -> int | None:
        """Returns the worker for one reply of a conversation and counts it as busy with it until `release`.

        None: no worker is left.
        """
        with self._lock:
            if not self._loads:
                return None
            worker = self._places.get(key)
            if worker is None:
                worker = min(self._loads, key=lambda each: (self._loads[each], each))
                self._places[key] = worker
                if len(self._places) > MAX_CONVERSATIONS:
                    self._places.popitem(last=False)
            self._places.move_to_end(key)
            self._loads[worker] += 1
            return worker

    def release(self, worker: int) -> None:
        with self._lock:
            if worker in self._loads:
                self._loads[worker] -= 1

    def add(self, worker: int) -> None:
        with self._lock:
            self._loads.setdefault(worker, 0)

    def remove(self, worker: int) -> None:
        """Takes a worker out; its conversations go elsewhere with their next turn."""
        with self._lock:
            self._loads.pop(worker, None)
            for key in [key for key, place in self._places.items() if place == worker]:
                del self._places[key]

    def forget(self) -> None:
        """Forgets where conversations are: new weights have emptied the caches."""
        with self._lock:
            self._places.clear()
