"""Kills what is left of a run's programs when the run itself is killed (`kill -9`, out of memory).

A small process of its own waits on a pipe that only the run holds open: it reads its end when the run ends, however
that ends, then kills the programs that carry the run's mark, and removes their folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.rollout.isolation import processes
from reinforge.rollout.isolation.threads import run_in_daemon_thread

RUN_MARK = "REINFORGE_RUN_PROCESS_ID"
"""The variable by which all programs of a run are recognized."""
GUARD = (
    "import runpy, shutil, sys; file, mark, folder = sys.argv[1:]; sys.stdin.buffer.read(); "
    "runpy.run_path(file)['kill_marked'](mark); shutil.rmtree(folder, ignore_errors=True)"
)
"""The guard: it imports nothing but the standard library, so that it is small and starts in milliseconds."""


class ProgramGuard:
    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.folder: Path | None = None
        self.pid = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[ProgramGuard]:
        self.folder = Path(tempfile.mkdtemp(prefix="reinforge-"))
        arguments = [str(processes.__file__), f"{RUN_MARK}={self._mark}", str(self.folder)]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        self.pid = guard.pid
        try:
            yield self
        finally:
            await asyncio.shield(run_in_daemon_thread(lambda: self._end(guard), "program-guard"))

    def _end(self, guard: subprocess.Popen[bytes]) -> None:
        guard.communicate()  # closes the pipe
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        return {RUN_MARK: self._mark}

    @contextlib.asynccontextmanager
    async def open_folder(self) -> AsyncIterator[Path]:
        """Yields a folder of one episode, which only this user can read, and removes it."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            yield folder
        finally:
            await asyncio.shield(run_in_daemon_thread(lambda: shutil.rmtree(folder, ignore_errors=True), "scratch"))
