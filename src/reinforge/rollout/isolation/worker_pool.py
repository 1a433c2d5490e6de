"""Workers: processes in which agents and evaluators run apart from the run's own process.

Each worker leads its own session and inherits neither the run's files nor its lock. `lease` gives a job a worker
of its own, which is killed, with everything that it has started, when the job takes too long or the run stops; another
one replaces it. `share` gives a job a place in one of a fixed number of workers, where other jobs run beside it. This
is not a sandbox: a worker has the rights of its user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from reinforge.errors import ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.rollout.isolation.containment import IMPORTED_FILES, WorkerEnded
from reinforge.rollout.isolation.processes import describe_exit, kill_group
from reinforge.rollout.isolation.worker_protocol import Message, decode, encode

START_S = 120.0  # seconds that a worker may take to import the function

END_S = 1.0  # seconds between two looks at whether a silent worker still runs

MAX_UNREAD = 1024  # messages of one job that wait to be read; a worker that sends more waits

WORKER_SETUP: dict[str, dict[str, Any]] = {}
"""`module:name` of functions that each worker calls before it imports the project, with their keyword arguments: what
this process has done to its own imports, such as `reinforge.compat.nat.install`."""


class WorkerJob:
    """One job of a worker, as the run sees it."""

    def __init__(self, worker: Worker, number: int):
        self.worker, self.number = worker, number
        self.is_done = False  # set by the job's owner once its result has come
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_UNREAD)

    async def send(self, message: Message) -> None:
        await self.worker.send({**message, "job": self.number})

    async def receive(self) -> Message:
        if self._messages.empty() and self.worker.end is not None:
            raise WorkerEnded(self.worker.end)
        message = await self._messages.get()
        if message is None:
            raise WorkerEnded(self.worker.end or "the process exited")
        return message

    async def deliver(self, message: Message) -> None:
        await self._messages.put(message)

    def close(self) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # then `receive` finds the end behind those that are left
            self._messages.put_nowait(None)

    def discard(self) -> None:
        """Drops what has not been read, so that the worker's other jobs do not wait behind it."""
        while not self._messages.empty():
            self._messages.get_nowait()


class Worker:
    def __init__(self, transport: WorkerTransport):
        self.transport = transport
        self.jobs: dict[int, WorkerJob] = {}
        self.end: str | None = None  # how it ended
        self._num_jobs = 0
        self._reading = asyncio.create_task(self._read())

    @property
    def is_alive(self) -> bool:
        return self.end is None and self.transport.is_alive

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    @contextlib.contextmanager
    def open_job(self) -> Iterator[WorkerJob]:
        job = WorkerJob(self, self._num_jobs)
        self._num_jobs += 1
        self.jobs[job.number] = job
        try:
            yield job
        finally:
            del self.jobs[job.number]
            job.discard()

    async def send(self, message: Message) -> None:
        line = encode(message)
        with contextlib.suppress(ConnectionError):  # `receive` says how it ended
            await self.transport.write(line)

    async def _read(self) -> None:
        reading: asyncio.Future[bytes] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(self.transport.readline())
                while not reading.done():
                    await asyncio.wait({reading}, timeout=END_S)
                    if not reading.done() and not self.transport.is_alive:
                        # a process that it has started keeps the connection open
                        raise ConnectionError
                line = reading.result()
                if not line.endswith(b"\n"):  # nothing, or what it was writing when it died
                    raise ConnectionError
                message = decode(line)
                if (job := self.jobs.get(message["job"])) is not None:
                    await job.deliver(message)
        except ConnectionError:
            self.end = await self.transport.describe_end()
        except ValueError as error:
            self.end = f"the process sent an unreadable message: {error}"
        finally:
            if reading is not None:
                reading.cancel()
            self.end = self.end or "the run stopped the process"
            for job in self.jobs.values():
                job.close()

    def kill(self) -> None:
        self.transport.kill()
        self._reading.cancel()


@dataclass(eq=False)
class _Place:
    """Where one of the shared workers is; another one replaces it when it dies."""

    num_jobs: int = 0
    worker: Worker | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkerPool:
    """The workers of one agent or evaluator: as many as are leased at the same time, and those that are shared.

    Args:
        function: What the workers load: `module:name` in the project's folder, or plain data for another loader.
        loader: `module:name` of the function in reinforge that loads it in the worker; see
            `reinforge.rollout.isolation.worker`.
        name: What messages call the function; None: its `module:name`.
        num_shared: How many workers `share` uses.
        open_transport: Starts a worker; None: in a process of this machine.
    """

    def __init__(
        self,
        function: str | Message,
        project_root: Path,
        loader: str,
        *,
        name: str | None = None,
        num_shared: int = 1,
        open_transport: Callable[[], Awaitable[WorkerTransport]] | None = None,
    ):
        self.function, self.project_root, self.loader = function, project_root, loader
        self.name = str(function) if name is None else name
        self.description: Message = {}  # what the worker that started last said about the function
        self.workers: list[Worker] = []
        self._places = [_Place() for _ in range(num_shared)]
        self._open_transport = open_transport or ProcessTransport.start
        self._sending: set[asyncio.Future[None]] = set()

    async def start(self, *, shared: bool = False) -> None:
        async with self.share() if shared else self.lease() as job:
            job.is_done = True

    @contextlib.asynccontextmanager
    async def lease(self, *, keep: bool = True) -> AsyncIterator[WorkerJob]:
        """Gives a job its own worker; kills it unless the job is done by the end of the block.

        Args:
            keep: Leave a worker whose job is done to the next one.
        """
        shared = [place.worker for place in self._places]
        idle = (each for each in self.workers if each.is_idle and each.is_alive and each not in shared)
        worker = next(idle, None) or await self._start_worker()
        with worker.open_job() as job:
            try:
                yield job
            finally:
                if not (job.is_done and keep):
                    self._kill(worker)

    @contextlib.asynccontextmanager
    async def share(self) -> AsyncIterator[WorkerJob]:
        """Gives a job a place in the least busy of the shared workers; cancels it unless it is done by the end."""
        place = min(self._places, key=lambda each: each.num_jobs)
        place.num_jobs += 1
        try:
            async with place.lock:
                if place.worker is None or not place.worker.is_alive:
                    if place.worker is not None:
                        self._kill(place.worker)
                    place.worker = None
                    place.worker = await self._start_worker()
                worker = place.worker
            with worker.open_job() as job:
                try:
                    yield job
                finally:
                    if not job.is_done and worker.is_alive:
                        self._cancel(job)
        finally:
            place.num_jobs -= 1

    def _cancel(self, job: WorkerJob) -> None:
        sending = asyncio.ensure_future(job.send({"type": "cancel"}))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    def end_worker(self, worker: Worker, reason: str) -> None:
        worker.end = worker.end or reason
        self._kill(worker)

    async def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def _kill(self, worker: Worker) -> None:
        worker.kill()
        if worker in self.workers:
            self.workers.remove(worker)

    async def _start_worker(self) -> Worker:
        worker = Worker(await self._open_transport())
        self.workers.append(worker)
        try:
            self.description = await self._introduce(worker)
        except BaseException:
            self._kill(worker)
            raise
        return worker

    async def _introduce(self, worker: Worker) -> Message:
        message = {"function": self.function, "project_root": str(self.project_root), "loader": self.loader}
        setup = {name: dict(arguments) for name, arguments in WORKER_SETUP.items()}
        failed = f'importing "{self.name}"'
        try:
            with worker.open_job() as job:
                async with asyncio.timeout(START_S):
                    await job.send({"type": "start", "setup": setup, **message})
                    answer = await job.receive()
        except WorkerEnded as error:
            raise ConfigError(Problem("function", f"{failed} failed: {error}")) from None
        except TimeoutError:
            raise ConfigError(Problem("function", f"{failed} did not exit within {START_S:g} s")) from None
        if answer["type"] == "refused":
            raise ConfigError([Problem(**problem) for problem in answer["problems"]])
        IMPORTED_FILES.update(str(file) for file in answer.get("files", ()))
        return answer


def refuse_other_functions(function: object) -> str:
    if os.name == "nt":
        message = "`process` needs an operating system with process groups, which Windows does not have"
        raise ConfigError(Problem("isolation", message, "use `thread`"))
    if not isinstance(function, str):
        name = getattr(function, "__qualname__", type(function).__name__)
        message = f"`process` needs the function's name, but {name} is a Python object of this process"
        raise ConfigError(Problem("isolation", message, 'write it into a module and pass "module:name"'))
    return function


EXIT_S = 1.0  # seconds between a worker's last message and its exit code

PROGRAM = (
    "import sys; sys.path[{start}:] = {path!r}; from reinforge.rollout.isolation.worker import main; main({descriptor})"
)
"""The worker finds the modules that the run finds, also those that only its own `sys.path` has; another interpreter
finds its own before them."""


class WorkerTransport(Protocol):
    """Carries lines to one worker and back."""

    @property
    def is_alive(self) -> bool:
        """True if the worker runs, as far as is known."""

    async def write(self, line: bytes) -> None: ...
    async def readline(self) -> bytes:
        """Returns the next line of the worker; empty: there will be none."""

    async def describe_end(self) -> str: ...
    def kill(self) -> None:
        """Kills the worker with everything that it has started; may be called again."""


class ProcessTransport:
    """A process of this machine, which leads its own session and group."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer

    @classmethod
    async def start(cls, python: str = sys.executable) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            start = 0 if python == sys.executable else "len(sys.path)"
            program = PROGRAM.format(start=start, path=sys.path, descriptor=theirs.fileno())
            command = [python, *["-O"] * sys.flags.optimize, "-c", program]
            variables = {"PYTHONHASHSEED": "0", **os.environ}  # sets of strings have one order in all of them
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=variables
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=get_limits().message_bytes)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def write(self, line: bytes) -> None:
        self.writer.write(line)
        await self.writer.drain()

    async def readline(self) -> bytes:
        return await self.reader.readline()

    async def describe_end(self) -> str:
        """Returns how the process exited, or that it closed its connection."""
        deadline = asyncio.get_running_loop().time() + EXIT_S
        while (code := self.process.poll()) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if code is None:
            return "the process closed its connection to the run"
        return f"the process {describe_exit(code)}"

    def kill(self) -> None:
        kill_group(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=EXIT_S)
        self.writer.transport.abort()
