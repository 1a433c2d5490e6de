"""Servers of the fine-tuning API that can be killed: `python -m tests.fault.job_server RUN`.

Imports once, then forks a server for each line `PORT FOLDER SITE` (with tabs) on its standard input, and writes its
process id. At SITE (`create_job:after`, `transition succeeded:before`, ...) the server kills itself; with `forget` it
does not recognize a client's retries. Its jobs are processes that copy a run that has ended, in about a tenth of a
second, and stop when the server does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from reinforge.config.schema import PolicyConfig
from reinforge.server.fine_tuning.api import FineTuningApi, FineTuningSettings
from reinforge.server.fine_tuning.launcher import RunningJob
from reinforge.server.fine_tuning.process import ENDED
from reinforge.server.fine_tuning.runner import JobSettings
from tests.fine_tuning import FineTuningServer, NamesOnly

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

    async def launch(self, folder: Path) -> RunningJob:
        arguments = ["-I", "-S", "-c", JOB, str(self.run), str(folder), ENDED]
        return _Process(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE))


def kill_at(api: FineTuningApi, site: str) -> None:
    """Makes a server kill itself before or after a call of its record, or after the models of a job are loaded."""
    name, _, place = site.partition(":")
    method, _, state = name.partition(" ")
    target: Any = api.models.host if method == "load" else api.store
    call = getattr(target, method)

    def die_or_call(*arguments: Any, **settings: Any) -> Any:
        if state and str(arguments[1]) != state:
            return call(*arguments, **settings)
        if place == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        call(*arguments, **settings)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(target, method, die_or_call)


async def serve(folder: Path, run: Path, port: int, site: str) -> None:
    """Serves until the process is killed."""
    settings = FineTuningSettings(folder, JobSettings(poll_s=0.02))
    bases = {"tiny": PolicyConfig(model="/nowhere/tiny")}
    server = FineTuningServer(
        folder, bases, launcher=CopyProcesses(run), host=NamesOnly(), settings=settings, serve_bases=False, port=port
    )
    if site.startswith("forget"):
        server.api.store.find_repeated = lambda digest: None  # type: ignore[method-assign]
    if ":" in site:
        kill_at(server.api, site.removeprefix("forget "))
    async with server:
        await asyncio.Event().wait()


def main(run: Path) -> None:
    """Forks a server for each line on the standard input."""
    for line in sys.stdin:
        port, folder, site = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            asyncio.run(serve(Path(folder), run, int(port), site))
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
