"""Starts and stops the process that runs a job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Protocol

from reinforge.files import open_private
from reinforge.rollout.isolation.processes import kill_group

LOG = "process.log"
STOP_S = 20.0
"""Seconds that a process has to write its last checkpoint once it is told to stop; then it is killed."""


class RunningJob(Protocol):
    """The process of one job."""

    async def wait(self) -> None:
        """Returns when it has ended."""

    async def stop(self) -> None:
        """Stops it, so that it can be resumed; returns when it has ended. Does nothing if it has."""


class Launcher(Protocol):
    """Starts processes of jobs."""

    async def launch(self, folder: Path) -> RunningJob:
        """Starts the process of the job in a folder; it ends when this process does, however that ends."""


class _JobProcess:
    """A process whose standard input is the sign that this server lives."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def wait(self) -> None:
        """Returns when it has ended."""
        await self._process.wait()

    async def stop(self) -> None:
        """Stops it, at first politely."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            kill_group(self._process.pid)
            await self._process.wait()


class ProcessLauncher:
    """Runs `reinforge.protocols.openai.server.process`, with its output in the job's folder."""

    async def launch(self, folder: Path) -> RunningJob:
        """Starts the process of the job in a folder."""
        with open(folder / LOG, "ab", opener=open_private) as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "reinforge.protocols.openai.server.process",
                str(folder),
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return _JobProcess(process)
