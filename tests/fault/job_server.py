"""Servers of the fine-tuning API that can be killed.

At a site (`create_job:after`, `transition succeeded:before`, ...) the server kills itself; with `forget` it does not
recognize a client's retries. Its jobs are processes that copy a run that has ended, in about a tenth of a second, and
stop when the server does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.openai.server.api import FineTuningApi, FineTuningSettings
from reinforge.protocols.openai.server.plan import JobSettings
from reinforge.protocols.openai.server.process import ENDED
from reinforge.protocols.openai.server.runner import JobProcess
from tests.fault.killed_servers import kill_at
from tests.protocols.fine_tuning import FineTuningServer, NamesOnly

JOB = """
import fcntl, json, os, select, shutil, sys, time
run, folder, ended = sys.argv[1:]
lock = open(os.path.join(folder, "job.lock"), "a")
fcntl.flock(lock, fcntl.LOCK_EX)
with open(os.path.join(folder, "starts"), "a") as file:
    file.write(f"{os.getpid()}\\n")
for step in range(5):
    if select.select([0], [], [], 0.02)[0] and not os.read(0, 1):
        sys.exit(143)
target = os.path.join(folder, "run")
shutil.rmtree(target, ignore_errors=True)
shutil.copytree(run, target)
with open(os.path.join(folder, ended + ".tmp"), "w") as file:
    json.dump({"exit_code": 0, "code": "completed", "message": ""}, file)
os.replace(os.path.join(folder, ended + ".tmp"), os.path.join(folder, ended))
"""


class _Process:
    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def wait(self) -> None:
        await self._process.wait()

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class CopyProcesses:
    """Starts the processes."""

    def __init__(self, run: Path):
        self.run = run

    async def launch(self, folder: Path) -> JobProcess:
        arguments = ["-I", "-S", "-c", JOB, str(self.run), str(folder), ENDED]
        return _Process(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE))


def die_at(api: FineTuningApi, site: str) -> None:
    """Makes a server kill itself before or after a call of its record, or after the models of a job are loaded."""
    name, _, place = site.partition(":")
    method, _, state = name.partition(" ")
    target: Any = api.models.host if method == "load" else api.store
    kill_at(target, method, place, lambda *arguments: not state or str(arguments[1]) == state)


async def serve(run: Path, folder: Path, port: int, site: str) -> None:
    """Serves until the process is killed."""
    settings = FineTuningSettings(folder, JobSettings(poll_s=0.02))
    bases = {"tiny": PolicyConfig(model="/nowhere/tiny")}
    server = FineTuningServer(
        folder, bases, launcher=CopyProcesses(run), host=NamesOnly(), settings=settings, serve_bases=False, port=port
    )
    if site.startswith("forget"):
        server.api.store.find_repeated = lambda digest: None  # type: ignore[method-assign]
    if ":" in site:
        die_at(server.api, site.removeprefix("forget "))
    async with server:
        await asyncio.Event().wait()
