"""How a worker is reached: a process of this machine over a pair of sockets; Ray's actors are another way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from typing import Protocol, Self

from reinforge.rollout.isolation.processes import describe_exit, kill_group
from reinforge.rollout.isolation.worker_protocol import MAX_MESSAGE

EXIT_S = 1.0
"""Seconds between a worker's last message and its exit code."""

PROGRAM = "import sys; sys.path[:] = {path!r}; from reinforge.rollout.isolation.worker import main; main({descriptor})"
"""The worker finds the modules that the run finds, also those that only its own `sys.path` has."""


class WorkerTransport(Protocol):
    """Carries lines to one worker and back."""

    @property
    def is_alive(self) -> bool:
        """True if the worker runs, as far as is known."""

    async def write(self, line: bytes) -> None:
        """Sends a line.

        Raises:
            ConnectionError: The worker is gone.
        """

    async def readline(self) -> bytes:
        """Returns the next line of the worker; empty: there will be none.

        Raises:
            ConnectionError: The worker is gone.
            ValueError: The line is too long.
        """

    async def describe_end(self) -> str:
        """Returns how the worker ended."""

    def kill(self) -> None:
        """Kills the worker with everything that it has started; may be called again."""


class ProcessTransport:
    """A process of this machine, which leads its own session and group."""

    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer

    @classmethod
    async def start(cls) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            program = PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
            command = [sys.executable, *["-O"] * sys.flags.optimize, "-c", program]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE)
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
        """Returns how the process ended, or that it closed its connection."""
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
