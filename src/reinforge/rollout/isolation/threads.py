"""Runs blocking work in daemon threads, and coroutines for blocking callers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from reinforge.errors import show
from reinforge.rollout.isolation.containment import create_loop

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Runs `work` in a new daemon thread and returns its result.

    If the caller is cancelled, the thread is abandoned; as a daemon it does not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except StopIteration as stop:  # asyncio futures do not accept it
            error = RuntimeError(f"StopIteration: {show(stop)}")
        except BaseException as raised:  # noqa: BLE001  re-raised in the caller
            error = raised if isinstance(raised, Exception) else RuntimeError(show(raised, repr))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await future


class LoopThread:
    """An event loop in a daemon thread, for blocking callers; also works where a loop is running (a notebook).

    Clients with open connections belong to the loop in which they were first used, so one owner runs all its work here.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        self._ensure_loop()
        if threading.current_thread().name == self._name:
            work.close()
            raise RuntimeError(f"{self._name}: a blocking call from the loop's own thread would deadlock")
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop; await it from another loop with `asyncio.wrap_future`."""
        return asyncio.run_coroutine_threadsafe(work, self._ensure_loop())

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop, self._closing = create_loop(), threading.Event()
                arguments = (self._loop, self._closing)
                threading.Thread(target=_run_loop, args=arguments, name=self._name, daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Stops the loop and frees its sockets; later work starts a new loop."""
        with self._lock:
            loop, self._loop = self._loop, None
            self._closing.set()
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def _run_loop(loop: asyncio.AbstractEventLoop, closing: threading.Event) -> None:
    try:
        while not closing.is_set():  # an agent may stop the loop too, or raise SystemExit in its own task
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
    finally:
        loop.close()
