"""The sessions of Tinker's clients, with the models that they train and the samplers that they use.

session  one client program; it expires when its heartbeat stops
model    one adapter that is trained; its requests run in the order of their seq_id, however they arrive
sampler  weights that do not change while a client samples from them
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reinforge.errors import EngineError
from reinforge.protocols.tinker.server.checkpoints import CheckpointNote
from reinforge.protocols.tinker.server.futures import Job, TinkerFuture, TinkerFutures
from reinforge.protocols.tinker.server.slots import AdapterSlots, Snapshot
from reinforge.serving.routes import ApiError

MAX_AHEAD = 10_000  # how far the seq_id of a request may be ahead of the next one to run
MAX_WAITING = 1000  # maximum requests of a model that wait for their turn
MAX_WAITING_BYTES = 1 << 26
"""Maximum bytes of their bodies; the next request to run is taken in any case, so that the others get their turn."""
KEPT_SNAPSHOTS = 8
"""Snapshots without a name that are kept for each model: a training loop makes one in each step and uses the newest."""


@dataclass(eq=False)
class TinkerSampler:
    """Weights to sample from."""

    id: str
    base_model: str
    snapshot: Snapshot | None = None  # the weights; None: those of the base model
    model_path: str | None = None
    is_gone: bool = False
    num_clients: int = 0


@dataclass(eq=False)
class TinkerModel:
    id: str
    slot: str
    note: CheckpointNote
    futures: TinkerFutures
    next_seq: int = 1
    failed_seq: int | None = None
    """The first request since the last optimizer step whose gradient is missing; None: none is."""
    inflight: Snapshot | None = None  # the snapshot that its inflight samplers share
    samplers: deque[TinkerSampler] = field(default_factory=deque)
    used_s: float = field(default_factory=time.time)  # Unix time of its last request

    def __post_init__(self) -> None:
        self._waiting: dict[int, tuple[TinkerFuture, Job, int]] = {}
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def check_turn(self, seq_id: int, num_bytes: int) -> None:
        """Refuses a request of which the turn is over or too far ahead, or for which the queue has no room."""
        if not self.next_seq <= seq_id <= self.next_seq + MAX_AHEAD:
            raise ApiError(
                400, f"seq_id is {seq_id}, but the next request of {self.id} to run is {self.next_seq}", param="seq_id"
            )
        held = sum(size for _, _, size in self._waiting.values())
        is_full = len(self._waiting) >= MAX_WAITING or held + num_bytes > MAX_WAITING_BYTES
        if is_full and seq_id != self.next_seq:
            message = (
                f"{len(self._waiting)} requests of {self.id} with {held >> 20} MiB wait for the request {self.next_seq}"
            )
            raise ApiError(429, message, code="too_many_requests", headers={"retry-after": "1"})

    def enqueue(self, seq_id: int, future: TinkerFuture, job: Job, num_bytes: int) -> None:
        self._waiting[seq_id] = (future, job, num_bytes)
        self.used_s = time.time()
        self._arrived.set()

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self.next_seq in self._waiting:
                future, job, _ = self._waiting.pop(self.next_seq)
                await self.futures.run(future, job, f"the session of {self.id} has ended")
                self.next_seq += 1

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        for future, _, _ in self._waiting.values():
            self.futures.fail(future, EngineError(f"the session of {self.id} has ended"))
        self._waiting.clear()


@dataclass(eq=False)
class TinkerSession:
    id: str
    metadata: dict[str, Any]
    display_name: str | None
    seen_s: float
    models: dict[str, TinkerModel] = field(default_factory=dict)
    samplers: dict[str, TinkerSampler] = field(default_factory=dict)


class TinkerSessions:
    def __init__(self, slots: AdapterSlots, now: Callable[[], float], timeout_s: float):
        self._slots, self.now, self.timeout_s = slots, now, timeout_s
        self._sessions: dict[str, TinkerSession] = {}
        self._by_key: dict[str, TinkerSession] = {}
        self._ended: deque[str] = deque(maxlen=1000)

    @property
    def ids(self) -> list[str]:
        return list(self._sessions)

    def open(self, metadata: dict[str, Any] | None, display_name: str | None, key: str | None) -> TinkerSession:
        """Returns a new session, or the one that the same request opened before."""
        if key is not None and key in self._by_key:
            return self._by_key[key]
        session = TinkerSession(secrets.token_hex(8), metadata or {}, display_name, self.now())
        self._sessions[session.id] = session
        if key is not None:
            self._by_key[key] = session
        return session

    def find(self, session_id: str) -> TinkerSession:
        """Returns an open session, which has just been heard of."""
        session = self._sessions.get(session_id)
        if session is None:
            why = "has ended" if session_id in self._ended else "is not known; the server may have been restarted"
            raise ApiError(
                410,
                f"the session {session_id[:100]!r} {why}. Open a new one (tinker.ServiceClient()), and continue from a "
                "saved checkpoint: create_training_client_from_state_with_optimizer(path)",
                code="session_ended",
            )
        session.seen_s = self.now()
        return session

    def list_models(self) -> list[TinkerModel]:
        return [model for session in self._sessions.values() for model in session.models.values()]

    def find_model(self, model_id: str) -> TinkerModel:
        session = self.find(model_id.partition(":")[0])
        if model_id not in session.models:
            raise ApiError(404, f"there is no model {model_id[:100]!r}", param="model_id", code="model_not_found")
        return session.models[model_id]

    def find_sampler(self, sampler_id: str) -> TinkerSampler:
        session = self.find(sampler_id.partition(":")[0])
        sampler = session.samplers.get(sampler_id)
        if sampler is None:
            message = f"there is no sampling session {sampler_id[:100]!r}"
            raise ApiError(404, message, param="sampling_session_id", code="sampler_not_found")
        if sampler.is_gone:
            raise ApiError(
                404,
                f"the weights of {sampler_id} are gone: of each model the {KEPT_SNAPSHOTS} newest snapshots without a "
                "name are kept; save_weights_for_sampler(name) keeps one permanently",
                param="sampling_session_id",
                code="sampler_expired",
            )
        return sampler

    async def keep_newest(self, model: TinkerModel) -> None:
        while len(model.samplers) > KEPT_SNAPSHOTS:
            sampler = model.samplers.popleft()
            snapshot, sampler.snapshot, sampler.is_gone = sampler.snapshot, None, True
            if snapshot is not None:
                await self._slots.drop(snapshot)

    async def end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._ended.append(session_id)
        self._by_key = {key: each for key, each in self._by_key.items() if each is not session}
        for model in session.models.values():
            await model.close()
            self._slots.release(model.slot)
        for sampler in list(session.samplers.values()):  # one that is being opened is added meanwhile
            if sampler.snapshot is not None:
                await self._slots.drop(sampler.snapshot)

    def has_silent(self, seconds: float) -> bool:
        return any(self.now() - session.seen_s > seconds for session in self._sessions.values())

    async def sweep(self, silence_s: float | None = None) -> None:
        """Ends the sessions that were not heard of for `silence_s`, or for `timeout_s`."""
        oldest = self.now() - (self.timeout_s if silence_s is None else silence_s)
        for session in list(self._sessions.values()):
            if session.seen_s < oldest:
                await self.end(session.id)

    async def close(self) -> None:
        for session_id in self.ids:
            await self.end(session_id)
