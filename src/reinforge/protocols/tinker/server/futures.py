"""Results of requests that are answered later: Tinker's clients submit first, then poll for the result.

    submit("s1:train:0:3")      the same id again: the request that is running, or has run
    wait("s1:train:0:3", 20)    its result; None if it is not there within 20 s

A client that lost an answer sends its request again, so each id is run once however often it comes. Its second body may
be another one: the SDK writes maps in any order, and counts a new sampling session for each attempt.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reinforge.dialects.chat_call import BadRequest
from reinforge.errors import ContextOverflow, EngineError
from reinforge.protocols.tinker.server.wire import CONTENT_TYPE
from reinforge.safe_text import redact_secrets
from reinforge.serving.routes import ApiError, hide_paths

logger = logging.getLogger(__name__)
KEEP_S = 600.0  # seconds for which a result is kept: its client may ask again, if the first answer was lost
MAX_BYTES = 1 << 28  # maximum bytes of results; the oldest ones that were retrieved go first


@dataclass(frozen=True, slots=True)
class TinkerResult:
    body: bytes
    content_type: str = "application/json"


Job = Callable[[], Awaitable[TinkerResult]]


@dataclass(eq=False)
class TinkerFuture:
    """A request and, once it has run, its result."""

    request_id: str
    result: TinkerResult | None = None  # None: it has not run yet
    finished_s: float = 0.0
    is_retrieved: bool = False
    task: asyncio.Task[None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class TinkerFutures:
    def __init__(self, now: Callable[[], float]):
        self._now, self._futures, self._num_bytes = now, dict[str, TinkerFuture](), 0

    def __len__(self) -> int:
        return len(self._futures)

    def has(self, request_id: str) -> bool:
        return request_id in self._futures

    def submit(self, request_id: str) -> tuple[TinkerFuture, bool]:
        known = self._futures.get(request_id)
        if known is not None:
            return known, False
        self._futures[request_id] = future = TinkerFuture(request_id)
        return future, True

    def start(self, request_id: str, job: Job) -> None:
        future, is_new = self.submit(request_id)
        if is_new:
            future.task = asyncio.create_task(self.run(future, job, "the request was cancelled"))

    async def run(self, future: TinkerFuture, job: Job, cancelled: str) -> None:
        try:
            self.finish(future, await job())
        except asyncio.CancelledError:
            self.fail(future, EngineError(cancelled))
            raise
        except Exception as error:  # noqa: BLE001  the client is told
            self.fail(future, error)

    def finish(self, future: TinkerFuture, result: TinkerResult) -> None:
        if future.result is not None:
            return
        future.result, future.finished_s = result, self._now()
        self._num_bytes += len(result.body)
        future.done.set()
        self._drop_old()

    def fail(self, future: TinkerFuture, error: Exception) -> None:
        self.finish(future, build_failure(error, future.request_id))

    async def wait(self, request_id: str, timeout_s: float) -> TinkerResult | None:
        """Returns a request's result; None if it has none within the time."""
        future = self._futures.get(request_id)
        if future is None:
            raise ApiError(
                410,
                f"there is no result of {request_id[:200]!r}: it was dropped {KEEP_S:g} s after the request had run, "
                "or the server was restarted",
                code="request_expired",
            )
        try:
            async with asyncio.timeout(timeout_s):
                await future.done.wait()
        except TimeoutError:
            return None
        future.is_retrieved = True
        return future.result

    def cancel(self, request_id: str) -> bool:
        """Stops a request whose client no longer waits; returns False if it cannot be stopped, or has run."""
        future = self._futures.get(request_id)
        if future is None or future.task is None or future.result is not None:
            return False
        future.task.cancel()
        return True

    def sweep(self) -> None:
        oldest = self._now() - KEEP_S
        for future in [each for each in self._futures.values() if each.result and each.finished_s < oldest]:
            self._drop(future)

    def _drop_old(self) -> None:
        if self._num_bytes <= MAX_BYTES:
            return
        for future in sorted(
            (each for each in self._futures.values() if each.is_retrieved), key=lambda each: each.finished_s
        ):
            if self._num_bytes > MAX_BYTES:
                self._drop(future)

    def _drop(self, future: TinkerFuture) -> None:
        assert future.result is not None
        self._num_bytes -= len(future.result.body)
        del self._futures[future.request_id]


def build_json(body: Mapping[str, Any]) -> TinkerResult:
    return TinkerResult(json.dumps(body).encode())


def build_proto(body: bytes) -> TinkerResult:
    return TinkerResult(body, CONTENT_TYPE)


def build_failure(error: Exception, request_id: str) -> TinkerResult:
    """Returns the failure of a request in the SDK's form: a sentence, and whether the user or the server caused it."""
    text = str(error) or type(error).__name__
    is_users = isinstance(error, BadRequest | ContextOverflow | EngineError | ValueError)
    if not is_users:
        logger.warning("%s failed: %s: %s", request_id, type(error).__name__, text, exc_info=error)
    return build_json({"error": hide_paths(redact_secrets(text)), "category": "user" if is_users else "server"})
