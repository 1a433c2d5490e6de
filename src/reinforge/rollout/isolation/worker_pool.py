"""Processes in which agents and evaluators run that are not trusted with the run's own process.

Each worker leads a session of its own and does one job at a time. It is killed, with everything that it has started,
when its job takes too long or the run stops; another one replaces it. It inherits neither the run's files nor its lock.
This is not a sandbox: a worker has the rights of its user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reinforge.errors import ConfigError, Problem
from reinforge.rollout.isolation.processes import describe_exit, kill_group
from reinforge.rollout.isolation.worker_protocol import MAX_MESSAGE, Message, decode, encode

Isolation = Literal["thread", "process"]

START_S = 120.0
"""Seconds that a worker may take to import the function."""

END_S = 1.0
"""Seconds between a worker's last message and its exit code."""

PROGRAM = "import sys; sys.path[:] = {path!r}; from reinforge.rollout.isolation.worker import main; main({descriptor})"
"""The worker finds the modules that the run finds, also those that only its own `sys.path` has."""


WORKER_SETUP: dict[str, dict[str, Any]] = {}
"""`module:name` of functions that each worker calls before it imports the project, with their keyword arguments: what
this process has done to its own imports, such as `reinforge.compat.nat.install`."""

FILES: set[str] = set()
"""The project's files that workers have imported; like `sys.modules`, which does not know them, for this process."""


class WorkerEnded(Exception):
    """A worker process ended, or sent something else than messages, before its job was done."""


@dataclass(eq=False)
class Worker:
    """One worker process.

    Attributes:
        process: The process; leads its own session and group.
        reader, writer: The run's end of the sockets.
        is_idle: True if it can take a job.
    """

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_idle: bool = False
    _unread: asyncio.Task[bytes] | None = field(default=None, repr=False)

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return self.process.poll() is None

    async def send(self, message: Message) -> None:
        """Sends a message.

        Raises:
            TypeError: It is no plain data.
            ValueError: It contains itself, or is too long.
        """
        line = encode(message)
        self.is_idle = False
        self.writer.write(line)
        with contextlib.suppress(ConnectionError):  # `receive` says how it ended
            await self.writer.drain()

    async def receive(self) -> Message:
        """Returns the next message.

        Raises:
            WorkerEnded: There will be none.
        """
        if self._unread is None:
            self._unread = asyncio.ensure_future(self.reader.readline())
        while not self._unread.done():
            await asyncio.wait({self._unread}, timeout=END_S)
            if not self._unread.done() and not self.is_alive:  # a process that it has started keeps the socket open
                raise WorkerEnded(await self._describe_end())
        reading, self._unread = self._unread, None
        try:
            line = reading.result()
            if not line:
                raise WorkerEnded(await self._describe_end())
            return decode(line)
        except ConnectionError:
            raise WorkerEnded(await self._describe_end()) from None
        except ValueError as error:
            raise WorkerEnded(f"the process sent what cannot be read: {error}") from None

    async def _describe_end(self) -> str:
        deadline = asyncio.get_running_loop().time() + END_S
        while (code := self.process.poll()) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if code is None:
            return "the process closed its connection to the run"
        return f"the process {describe_exit(code)}"

    def kill(self) -> None:
        """Kills the process with everything that it has started."""
        kill_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=END_S)
        if self._unread is not None:
            self._unread.cancel()
        self.writer.transport.abort()


class WorkerPool:
    """The worker processes of one agent or evaluator; as many as run at the same time.

    Args:
        function: `module:name` in the project's folder, which only the workers import.
        project_root: That folder.
        loader: `module:name` of the function in reinforge that loads it in the worker; see
            `reinforge.rollout.isolation.worker`.
    """

    def __init__(self, function: str, project_root: Path, loader: str):
        self.function, self.project_root, self.loader = function, project_root, loader
        self.description: Message = {}
        self.workers: list[Worker] = []

    async def start(self) -> None:
        """Starts the first worker, which checks the function.

        Raises:
            ConfigError: The function cannot be imported, or takes other parameters.
        """
        async with self.lease():
            pass

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        """Gives a worker for one job; kills it unless the job is done by the end of the block.

        Raises:
            ConfigError: A new worker cannot import the function.
        """
        worker = next((each for each in self.workers if each.is_idle and each.is_alive), None)
        worker = worker or await self._start_worker()
        try:
            yield worker
        finally:
            if not worker.is_idle:
                worker.kill()
                self.workers.remove(worker)

    async def close(self) -> None:
        """Kills every worker."""
        while self.workers:
            self.workers.pop().kill()

    async def _start_worker(self) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            program = PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
            command = [sys.executable, *["-O"] * sys.flags.optimize, "-c", program]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE)
        worker = Worker(process, reader, writer)
        self.workers.append(worker)
        try:
            self.description = await self._introduce(worker)
        except BaseException:
            worker.kill()
            self.workers.remove(worker)
            raise
        worker.is_idle = True
        return worker

    async def _introduce(self, worker: Worker) -> Message:
        """Tells a worker what to load; returns what it says about the function."""
        message = {"function": self.function, "project_root": str(self.project_root), "loader": self.loader}
        setup = {name: dict(arguments) for name, arguments in WORKER_SETUP.items()}
        try:
            async with asyncio.timeout(START_S):
                await worker.send({"type": "start", "setup": setup, **message})
                answer = await worker.receive()
        except WorkerEnded as error:
            raise ConfigError(Problem("function", f'importing "{self.function}" failed: {error}')) from None
        except TimeoutError:
            raise ConfigError(
                Problem("function", f'importing "{self.function}" did not end within {START_S:g} s')
            ) from None
        if answer["type"] == "refused":
            raise ConfigError([Problem(**problem) for problem in answer["problems"]])
        FILES.update(str(file) for file in answer.get("files", ()))
        return answer


def refuse_other_functions(function: object) -> str:
    """Returns the function's `module:name`.

    Raises:
        ConfigError: It cannot run in another process.
    """
    if os.name == "nt":
        message = "`process` needs an operating system with process groups, which Windows does not have"
        raise ConfigError(Problem("isolation", message, "use `thread`"))
    if not isinstance(function, str):
        name = getattr(function, "__qualname__", type(function).__name__)
        message = f"`process` needs the function's name, but {name} is a Python object of this process"
        raise ConfigError(Problem("isolation", message, 'write it into a module and pass "module:name"'))
    return function
