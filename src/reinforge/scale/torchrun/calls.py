"""Calls of an `EngineWorker`, in this process or in another one over a socket."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from reinforge.errors import BackendUnavailable, ReinforgeError, describe_error


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    call: Callable[[str, tuple[Any, ...]], Future[Any]]
    name: str

    def remote(self, *arguments: Any) -> Future[Any]:
        return self.call(self.name, arguments)


class WorkerLoop:
    """Runs the methods of a worker, many at a time, in its own thread."""

    def __init__(self, worker: Any):
        self._worker, self._loop = worker, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-worker", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(self.start, name)

    def start(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Starts a call; cancelling its future cancels it."""
        return asyncio.run_coroutine_threadsafe(getattr(self._worker, method)(*arguments), self._loop)

    def close(self) -> None:
        """Cancels the calls that still run, and ends the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class WorkerClient:
    def __init__(self, connection: Connection, name: str):
        self._connection, self._name = connection, name
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._end: BackendUnavailable | None = None
        self._thread = threading.Thread(target=self._receive, name=f"{name}-replies", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> RemoteMethod:
        return RemoteMethod(self.start, name)

    def start(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Starts a call; cancelling its future cancels it."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._end is not None:
                future.set_exception(self._end)
                return future
            self._waiting[number] = future
        self._send((number, method, arguments))
        future.add_done_callback(lambda done: self._send((number, None, ())) if done.cancelled() else None)
        return future

    def _send(self, message: Any) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:  # `_receive` sees it too, and fails the calls
            return

    def _receive(self) -> None:
        try:
            while True:
                number, value, error = self._connection.recv()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None or not future.set_running_or_notify_cancel():
                    continue
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            self._fail_calls(BackendUnavailable(f"{self._name} has exited; resume the run with --resume"))
        except Exception as cause:  # noqa: BLE001  unpickling runs the code of any class
            reason = f"{self._name} sent an unreadable message: {describe_error(cause)}"
            self._fail_calls(BackendUnavailable(f"{reason}; resume the run with --resume"))

    def _fail_calls(self, error: BackendUnavailable) -> None:
        with self._lock:
            self._end, waiting = error, list(self._waiting.values())
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def close(self) -> None:
        """Disconnects, after which the worker releases its engine."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as opened, suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)  # `close` alone does not end a wait for the next message
        self._thread.join()
        self._connection.close()


class CallServer:
    def __init__(self, connection: Connection, calls: WorkerLoop):
        self._connection, self._calls, self._lock = connection, calls, threading.Lock()
        self._running: dict[int, Future[Any]] = {}

    def serve(self) -> None:
        try:
            while True:
                number, method, arguments = self._connection.recv()
                if method is None:
                    if (running := self._running.pop(number, None)) is not None:
                        running.cancel()
                    continue
                self._running[number] = call = self._calls.start(method, arguments)
                call.add_done_callback(partial(self._reply, number))
        except (EOFError, OSError):
            return

    def _reply(self, number: int, done: Future[Any]) -> None:
        self._running.pop(number, None)
        if done.cancelled():
            return
        error = done.exception()
        message = (number, done.result(), None) if error is None else (number, None, _make_portable(error))
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            return
        except Exception as failure:  # noqa: BLE001  whatever cannot be pickled
            cause = failure if error is None else error
            with self._lock:
                self._connection.send((number, None, ReinforgeError(f"a worker failed: {describe_error(cause)}")))


def _make_portable(error: BaseException) -> BaseException:
    """Returns an error that another process can make again: `copy` does what reading it there does.

    Example: an error whose `__init__` takes a message and a code, and hands only the message to `Exception`, cannot be.
    """
    try:
        copy.copy(error)
    except Exception:  # noqa: BLE001  whatever its class raises
        return ReinforgeError(f"a worker failed: {describe_error(error)}")
    return error
