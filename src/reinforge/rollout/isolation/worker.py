"""The program of a worker process: loads one function or agent and runs its jobs, for the run that has started it.

It exits, with everything that it has started, as soon as the run's end of the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, StorageError
from reinforge.rollout.isolation.containment import create_loop, run_loop
from reinforge.rollout.isolation.worker_protocol import Message, decode, dump_error, encode, load_error

Perform = Callable[[Message, "JobLink"], Awaitable[Any]]  # does one job and returns its result, as plain data

Loader = Callable[[Any, Path], "tuple[Perform, Message] | Awaitable[tuple[Perform, Message]]"]
"""Imports what the run names; returns how to do a job with it, and what the run wants to know about it."""


class Link:
    """The connection to the run, the jobs that it has sent, and the requests that wait for a reply."""

    def __init__(self, write: Callable[[bytes], None], loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.jobs: asyncio.Queue[Message] = asyncio.Queue()
        self._write = write
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    def send(self, message: Message) -> None:
        line = encode(message)
        with self._lock:
            self._write(line)

    async def request(self, message: Message) -> Message:
        number = next(self._numbers)
        future = self._waiting[number] = self.loop.create_future()
        try:
            self.send({**message, "id": number})
            reply = await future
        finally:
            del self._waiting[number]
        if "error" in reply:
            raise load_error(reply["error"])
        return reply

    def start(self, perform: Perform, job: Message) -> None:
        number = job["job"]
        task = self._running[number] = self.loop.create_task(_do(JobLink(self, number), perform, job))
        task.add_done_callback(lambda _: self._running.pop(number, None))

    def dispatch(self, message: Message) -> None:
        if message["type"] == "job":
            self.jobs.put_nowait(message)
        elif message["type"] == "cancel":
            if (task := self._running.get(message["job"])) is not None:
                task.cancel()
        elif (future := self._waiting.get(message["id"])) is not None and not future.done():
            future.set_result(message)

    def read(self, lines: Any) -> None:
        """Runs on its own thread, so that a job that blocks the loop does not hide the end of the run."""
        with contextlib.suppress(OSError, ValueError):
            for line in lines:
                self.receive(line)
        os.killpg(0, signal.SIGKILL)  # the run is over

    def receive(self, line: bytes) -> None:
        self.loop.call_soon_threadsafe(self.dispatch, decode(line), context=contextvars.Context())


class JobLink:
    def __init__(self, link: Link, number: int):
        self._link, self._number = link, number
        self.loop = link.loop

    def send(self, message: Message) -> None:
        self._link.send({**message, "job": self._number})

    async def request(self, message: Message) -> Message:
        return await self._link.request({**message, "job": self._number})


def main(descriptor: int) -> None:
    """Serves the run at the other end of a socket until it is killed."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    lines = connection.makefile("rb")
    start = decode(lines.readline())
    loop = create_loop()
    link = Link(connection.sendall, loop)
    threading.Thread(target=link.read, args=(lines,), name="reinforge-link", daemon=True).start()
    try:
        run_loop(loop, loop.create_task(serve(link, start)))
    except StorageError:  # the function has closed the process's files, so no answer can be sent
        os._exit(StorageError.exit_code)


def _find(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


async def serve(link: Link, start: Message) -> None:
    """Loads what the run names, then serves jobs until the connection closes."""
    first = JobLink(link, start["job"])
    for function, arguments in start.get("setup", {}).items():
        _find(function)(**arguments)
    load: Loader = _find(start["loader"])
    try:
        loaded = load(start["function"], Path(start["project_root"]))
        perform, description = await loaded if inspect.isawaitable(loaded) else loaded
    except ConfigError as error:
        first.send({"type": "refused", "problems": [vars(problem) for problem in error.problems]})
        return
    root = os.path.realpath(start["project_root"])
    first.send({**description, "type": "ready", "files": list_imported_files(root)})
    while True:
        link.start(perform, await link.jobs.get())


def list_imported_files(root: str) -> list[str]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return sorted(file for file in files if isinstance(file, str) and os.path.realpath(file).startswith(root + os.sep))


async def _do(link: JobLink, perform: Perform, job: Message) -> None:
    try:
        result = await perform(job, link)
        answer = encode_result(result)
    except BaseException as error:  # noqa: BLE001  the run decides what it means
        answer = {"type": "failed", "error": dump_error(error, is_final=True)}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        link.send(answer)
    except (TypeError, ValueError) as error:  # the output of a PolicyFailure
        link.send({"type": "failed", "error": dump_error(describe_unsendable(error), is_final=True)})


def encode_result(result: Any) -> Message:
    message = {"type": "done", "result": result}
    try:
        encode(message)
    except (TypeError, ValueError) as error:
        raise describe_unsendable(error) from None
    return message


def describe_unsendable(error: Exception) -> TypeError:
    return TypeError(f"the result cannot leave the process: {error}; return strings, numbers, lists or dicts")
