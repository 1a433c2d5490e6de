"""Coroutines that wait for replies: how their requests reach the sampler's thread, and how it wakes them.

Requests that are ready in the same turn of an event loop reach the sampler together, and the replies that a step
finishes come back with one call into each loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.engine.sampling.sampler import ReplySampler
from reinforge.engine.sampling.threads import ThreadLoad
from reinforge.errors import EngineError

MAX_TURNS = 8  # turns of an event loop over which requests are gathered, as long as each turn adds more


@dataclass(eq=False, slots=True)
class Caller:
    """A coroutine that waits for a reply."""

    loop: asyncio.AbstractEventLoop  # its event loop
    future: asyncio.Future[None]  # done when the reply is
    waiter: asyncio.Future[None] | None = None  # done at the next token, while a caller that streams waits for one

    def wake(self) -> None:
        """Wakes a caller that streams; runs in its loop."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@dataclass(eq=False)
class Outbox:
    """Requests of one event loop on their way to the sampler, and the load of that loop's thread."""

    requests: list[SampleRequest] = field(default_factory=list)
    load: ThreadLoad = field(default_factory=ThreadLoad)


class Outboxes:
    """Gathers the requests of every event loop, for one sampler."""

    def __init__(self, sampler: ReplySampler):
        self._sampler = sampler
        self._lock = threading.Lock()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Outbox] = weakref.WeakKeyDictionary()

    def post(self, loop: asyncio.AbstractEventLoop, request: SampleRequest, sent: Callable[[], None]) -> None:
        """Puts a request into its loop's outbox, which is sent once it stops growing; runs in that loop.

        Args:
            sent: Called after it was sent.
        """
        with self._lock:
            outbox = self._by_loop.get(loop) or self._by_loop.setdefault(loop, Outbox())
        outbox.requests.append(request)
        if len(outbox.requests) == 1:
            loop.call_soon(self._send, loop, outbox, 1, MAX_TURNS, sent)

    def _send(
        self, loop: asyncio.AbstractEventLoop, outbox: Outbox, count: int, turns: int, sent: Callable[[], None]
    ) -> None:
        if len(outbox.requests) > count and turns:
            loop.call_soon(self._send, loop, outbox, len(outbox.requests), turns - 1, sent)
            return
        requests, outbox.requests = outbox.requests, []
        try:
            self._sampler.submit(requests, outbox.load.measure())
        except EngineError as error:
            for request in requests:
                request.error = error
            _wake_callers(requests)
        sent()


def deliver_replies(requests: list[SampleRequest]) -> None:
    _call_loops(_wake_callers, requests)


def report_tokens(requests: list[SampleRequest]) -> None:
    _call_loops(_wake_streams, requests)


def _call_loops(function: Callable[[list[SampleRequest]], None], requests: list[SampleRequest]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[SampleRequest]] = {}
    for request in requests:
        by_loop.setdefault(request.owner.loop, []).append(request)  # type: ignore[attr-defined]
    for loop, done in by_loop.items():
        try:
            loop.call_soon_threadsafe(function, done)
        except RuntimeError:  # the loop is closed, so its callers no longer wait
            continue


def _wake_callers(requests: list[SampleRequest]) -> None:
    """Resolves the futures of these requests; runs in their loop."""
    for request in requests:
        caller: Caller = request.owner  # type: ignore[assignment]
        if not caller.future.done():
            caller.future.set_result(None)
        caller.wake()


def _wake_streams(requests: list[SampleRequest]) -> None:
    for request in requests:
        request.owner.wake()  # type: ignore[attr-defined]
