"""Several engines as one: each call that a training job makes of `Engine` is made of every process at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from reinforge.adapters.described_policy import DescribedPolicy
from reinforge.errors import BackendError
from reinforge.scale.engine_worker import PolicyDescription, Scores
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, Needs, Sharding, TrainingSample, UpdateReport


class EngineGroup(ABC):
    """Engines that hold the same weights, or shards of them, and make the same steps. Calls block.

    Attributes:
        turns: Held during a call of all processes, which exchange weights in it: two at once would mix their messages.
    """

    def __init__(self) -> None:
        self.turns = threading.RLock()

    @property
    @abstractmethod
    def sharding(self) -> Sharding:
        """What was chosen of `replicate` and `full`."""

    @abstractmethod
    def call_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Calls a method of `EngineWorker` in every process that trains; returns what each returned, by its name."""

    @abstractmethod
    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        """Returns the answer of the worker that a conversation belongs to."""

    def call_connected(self, method: str, *arguments: Any) -> dict[str, Any]:
        with self.turns:
            return self.call_all(method, *arguments)

    async def score_tokens(self, name: str, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Scores tokens with one process; with all where each has a shard of the weights."""
        if self.sharding == "full":
            found = await asyncio.to_thread(self.call_connected, "score_tokens", name, token_ids)
            return list(next(iter(found.values())))
        rows: list[FloatArray] = await self.ask("score", lambda actor: actor.score_tokens.remote(name, token_ids))
        return rows

    def share(self, value: Any) -> Any:
        return value

    def pack_loss(self, loss: LossSpec) -> bytes | None:
        """Returns the function of a loss that only this process has imported."""
        return None

    def use_stage(self, stage: str, adapter: str | None = None) -> None:
        self.call_connected("call", "use_stage", stage, adapter)

    def reset(self, adapter: str | None = None) -> None:
        self.call_connected("call", "reset", adapter)

    def score(
        self, samples: Sequence[TrainingSample], needs: Needs, adapter: str | None = None, *, defer: bool = False
    ) -> None:
        """Sets what the algorithm needs on each sample, never later (`defer`): another process may train it."""
        if not (needs.old_logprobs or needs.ref_logprobs or needs.values):
            return
        scores: dict[int, Scores] = self._merge("score", samples, needs, adapter)
        for index, sample in enumerate(samples):
            found = scores[index]
            sample.old_logprobs, sample.values = found.old_logprobs, found.values
            sample.ref_logprobs, sample.defers_old_logprobs = found.ref_logprobs, False
            if sample.mismatched is not None:
                sample.mismatched.ref_logprobs = found.mismatched_ref_logprobs

    def logprobs(self, samples: Sequence[TrainingSample], adapter: str | None = None) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens; each process scores its share."""
        rows = self._merge("logprobs", samples, adapter) if samples else {}
        return [rows[index] for index in range(len(samples))]

    def _merge(self, method: str, samples: Sequence[TrainingSample], *arguments: Any) -> dict[int, Any]:
        parts = self.call_connected(method, self.share(list(samples)), *arguments)
        return {index: value for part in parts.values() for index, value in part.items()}

    def update(self, samples: Sequence[TrainingSample], loss: LossSpec, **settings: Any) -> UpdateReport:
        packed = self.pack_loss(loss)
        found: dict[str, tuple[UpdateReport, str]] = self.call_connected(
            "update", self.share(list(samples)), loss, settings, packed
        )
        require_equal({name: fingerprint for name, (_, fingerprint) in found.items()})
        return next(iter(found.values()))[0]


def require_equal(fingerprints: Mapping[str, str]) -> None:
    if len(set(fingerprints.values())) > 1:
        found = ", ".join(f"{name}: {each}" for name, each in fingerprints.items())
        raise BackendError(f"the workers do not have the same weights ({found}); the job is undone")


class Workers(Protocol):
    """What the policy asks of the workers."""

    async def ask(self, key: str, call: Callable[[Any], Any]) -> Any:
        """Returns the answer of the worker that a conversation belongs to."""

    async def score_tokens(self, name: str, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token, by the published weights."""

    def publish(self, name: str, version: int) -> None:
        """Opens admission on every worker."""

    def compare_fingerprints(self, name: str) -> str:
        """Returns the fingerprint of the weights that every worker has."""


class RoutedPolicy(DescribedPolicy):
    """Samples from one adapter, or from the only policy, on any of the workers."""

    def __init__(self, group: Workers, name: str, description: PolicyDescription):
        super().__init__(description)
        self._group, self.name = group, name

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; if its worker dies meanwhile, another one samples it."""
        key = find_conversation(request)
        reply: ModelReply = await self._group.ask(key, lambda actor: actor.sample.remote(self.name, request))
        return self.note_version(reply)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        return await self._group.score_tokens(self.name, token_ids)

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs:
        tokens: TokenLogprobs = await self._group.ask(
            find_conversation(request), lambda actor: actor.encode.remote(self.name, request, reply)
        )
        return tokens

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self._group.publish, self.name, version)
        self._version = version

    async def fingerprint(self) -> str:
        return await asyncio.to_thread(self._group.compare_fingerprints, self.name)


MAX_CONVERSATIONS = 65_536
"""Conversations whose worker is remembered; the oldest is forgotten first, which costs its cached prefix."""


def find_conversation(request: ModelRequest) -> str:
    """Returns a key that all turns of a conversation share, and its siblings, which begin with the same messages.

    Example: system S, user U, assistant A, user V -> the key of S and U, as of the first turn
    """
    first = next((i for i, each in enumerate(request.messages) if each.get("role") == "assistant"), None)
    start = [request.messages[:first], request.tools, request.prompt]
    return hashlib.sha256(json.dumps(start, sort_keys=True, default=str).encode()).hexdigest()


class EngineRouter:
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

    def has(self, worker: int) -> bool:
        return worker in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def forget(self) -> None:
        with self._lock:
            self._places.clear()
