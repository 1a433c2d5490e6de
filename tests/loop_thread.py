"""An event loop in a thread of its own, in which a test's server runs while the test blocks."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in its loop, from its entry as a context manager on."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def serve_in_thread(server: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Runs a server, an asynchronous context manager, in a loop of its own."""
    with LoopThread() as thread:
        yield thread.call(server.__aenter__())  # type: ignore[arg-type]
        thread.call(server.__aexit__(None, None, None))  # type: ignore[arg-type]
