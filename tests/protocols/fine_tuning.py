"""A server with the fine-tuning API in this process, over real HTTP: real runs on a tiny model, or a scripted launcher.

async with FineTuningServer(tmp_path, {"tiny": PolicyConfig(model=...)}) as server:
    server.url, server.api, server.served
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.openai.server.api import FineTuningApi, FineTuningSettings
from reinforge.protocols.openai.server.plan import RUN
from reinforge.protocols.openai.server.process import ENDED, INTERRUPTED, run_job
from reinforge.protocols.openai.server.records import FileRecord
from reinforge.protocols.openai.server.request import read_job
from reinforge.protocols.openai.server.runner import ProcessLauncher
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.serving.app import ServeApp
from reinforge.serving.chat import ChatApi
from reinforge.serving.loading import BaseModels, LoadSettings, ModelLoader
from reinforge.serving.models import ServedModels
from reinforge.serving.routes import ServerLimits
from tests.loop_thread import LoopThread

T = TypeVar("T")


class ThreadLauncher:
    """Runs jobs in threads of this process, which has imported torch already; they cannot be stopped."""

    def __init__(self) -> None:
        self.launched: list[Path] = []

    async def launch(self, folder: Path) -> ThreadJob:
        self.launched.append(folder)
        return ThreadJob(folder)


class ThreadJob:
    """The run of one job in a thread."""

    def __init__(self, folder: Path):
        def work() -> None:
            (folder / ENDED).write_text(json.dumps(run_job(folder)))

        self._task = asyncio.create_task(run_in_daemon_thread(work, "job"))

    async def wait(self) -> None:
        await asyncio.wait({self._task})

    async def stop(self) -> None:
        await self.wait()


class CopyLauncher:
    """Jobs that take no time: each is given a copy of the folder of a run that has ended.

    Attributes:
        launched: The folders of the jobs that were started, in order.
        hold: A job ends once this is set, or when it is stopped.
        ends: How the next jobs end, one each: `killed`, a code and a message, or an error at their start; later ones
            are complete.
    """

    def __init__(self, run: Path):
        self.run = run
        self.launched: list[Path] = []
        self.stopped: list[Path] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.ends: list[Any] = []

    async def launch(self, folder: Path) -> CopiedJob:
        self.launched.append(folder)
        end = self.ends.pop(0) if self.ends else None
        if isinstance(end, OSError):
            raise end
        return CopiedJob(self, folder, end)


class CopiedJob:
    def __init__(self, launcher: CopyLauncher, folder: Path, end: Any):
        self._launcher, self._folder, self._end = launcher, folder, end
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        waits = {asyncio.create_task(self._launcher.hold.wait()), asyncio.create_task(self._stop.wait())}
        _, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in left:
            each.cancel()
        ended = {"exit_code": 0, "code": "completed", "message": ""}
        if self._stop.is_set():
            ended = {"exit_code": 143, "code": INTERRUPTED, "message": "stopped by SIGTERM"}
        elif self._end == "killed":
            return
        elif self._end is not None:
            ended = {"exit_code": 3, "code": self._end[0], "message": self._end[1]}
        else:
            shutil.copytree(self._launcher.run, self._folder / RUN, dirs_exist_ok=True)
        (self._folder / ENDED).write_text(json.dumps(ended))

    async def wait(self) -> None:
        await asyncio.wait({self._task})

    async def stop(self) -> None:
        if not self._task.done():
            self._launcher.stopped.append(self._folder)
        self._stop.set()
        await self.wait()


def make_finished_run(folder: Path, model: Path) -> Path:
    async def make() -> Path:
        bases = {"tiny": PolicyConfig(model=str(model), lora={"r": 4})}
        async with FineTuningServer(
            folder, bases, launcher=ThreadLauncher(), host=NamesOnly(), serve_bases=False
        ) as server:
            content = to_jsonl(supervised_rows(8))
            file = FileRecord("file-1", len(content), 1, "rows.jsonl", "fine-tune", "0")
            server.api.contents.write(file.id, content)
            server.api.store.add_file(file)
            body = {"model": "tiny", "training_file": file.id, "hyperparameters": {"n_epochs": 2, "batch_size": 4}}
            job = read_job({**body, "seed": 1})
            server.api.store.create_job(job, "d")
            server.api.runner.drive(job.id)
            done = await server.wait(job.id)
            assert done.state.value == "succeeded", done.error
            return folder / "jobs" / job.id / RUN

    return asyncio.run(make())


class NamesOnly:
    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}

    async def load(self, name: str, folder: Path, base: str) -> None:
        self.folders[name] = folder

    async def unload(self, name: str) -> None:
        self.folders.pop(name, None)


class FineTuningServer:
    """One server; `async with` starts and stops it. The same folder can be used again after that."""

    def __init__(
        self,
        folder: Path,
        bases: Mapping[str, PolicyConfig],
        *,
        launcher: ProcessLauncher | None = None,
        host: Any = None,
        settings: FineTuningSettings | None = None,
        serve_bases: bool = True,
        token: str | None = None,
        port: int = 0,
    ):
        self.served = ServedModels()
        self.loader = ModelLoader(self.served, LoadSettings(device="cpu", takes_adapters=True))
        self.host = host or self.loader
        self.bases, self._serve_bases = bases, serve_bases
        settings = settings or FineTuningSettings(folder)
        self.api = FineTuningApi(self.served, BaseModels(bases), self.host, settings, launcher)
        self.app = ServeApp(self.served, [self.api, ChatApi(self.served, ServerLimits())], token=token, port=port)

    async def __aenter__(self) -> FineTuningServer:
        if self._serve_bases:
            for name, policy in self.bases.items():
                await self.loader.load(name, Path(str(policy.model)), name)
        await self.app.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.app.__aexit__(*exc_info)
        await self.served.close()
        await self.loader.close()

    @property
    def url(self) -> str:
        return f"{self.app.address}/v1"

    async def wait(self, job_id: str, seconds: float = 120) -> Any:
        async with asyncio.timeout(seconds):
            while (task := self.api.runner._tasks.get(job_id)) is not None:
                await asyncio.wait({task})
        return self.api.store.find_job(job_id)


class ThreadedServer:
    """A server in a thread with an event loop of its own, so that commands and other programs can use it.

    Attributes:
        server: The server.
        url: Its base URL, up to `/v1`.
        key: Sent by clients; the server needs none.
    """

    key = "sk-any"

    def __init__(self, make: Callable[[], FineTuningServer]):
        self._thread, self._make = LoopThread(), make

    def __enter__(self) -> ThreadedServer:
        self._thread.__enter__()

        async def start() -> FineTuningServer:
            return await self._make().__aenter__()

        self.server = self.call(start())
        self.url = self.server.url
        return self

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(work)

    def __exit__(self, *exc_info: Any) -> None:
        self.call(self.server.__aexit__())
        self._thread.__exit__(*exc_info)


def to_jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def supervised_rows(count: int, reply: str = "aeiou") -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": reply}]}
        for number in range(count)
    ]


@contextmanager
def serve_tiny_model(folder: Path, *options: str) -> Iterator[str]:
    """Yields the URL, up to `/v1`, of `reinforge serve --fine_tuning` in a process of its own."""
    from tests.models import make_tiny_model  # imports torch

    model = make_tiny_model(folder / "tiny")
    command = [sys.executable, "-m", "reinforge", "serve", str(model), "--fine_tuning", "--port", "0"]
    command += ["--data_dir", str(folder / "data"), "--device", "cpu", *options]
    log = folder / "serve.log"
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            for _ in range(1200):
                if (found := re.search(r"OPENAI_BASE_URL=(\S+)\s", log.read_text())) is not None:
                    break
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            assert found is not None, log.read_text()
            yield found[1]
        finally:
            process.terminate()
