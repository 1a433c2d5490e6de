"""Blocking work on daemon threads, which an interrupted run need not wait for; and a loop for blocking callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Runs `work` on a thread of its own and returns what it returns; if the caller gives up, it is left behind.

    Args:
        work: The blocking call.
        name: The thread's name, for a person who looks at a stuck process.
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
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:  # noqa: BLE001  raised again where the caller awaits
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await future


class LoopThread:
    """An event loop on a daemon thread of its own, for blocking callers, also where a loop runs already (a notebook).

    Clients that keep connections belong to the loop that they were first used in: all work of one owner goes here.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns what it returns.

        Raises:
            RuntimeError: Called on the loop's own thread, which would wait for itself.
        """
        self._started()
        if threading.current_thread().name == self._name:
            work.close()
            raise RuntimeError(f"{self._name}: blocking work cannot wait for its own loop")
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop; another loop awaits it by `asyncio.wrap_future`."""
        return asyncio.run_coroutine_threadsafe(work, self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Ends the thread, which gives back the loop's sockets; work afterwards begins another one."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
