"""The workers of a run in which environments run, apart from the run's own process.

A worker does one call at a time. One that hangs, dies or needs too much memory is replaced: the episode whose call it
was is missing, and the others are played again up to where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem, show
from reinforge.rollout.isolation.containment import WorkerEnded
from reinforge.rollout.isolation.worker_pool import Worker, WorkerPool
from reinforge.rollout.isolation.worker_protocol import Message, load_error, load_item
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)

LOADER = "reinforge.environments.worker:load_source"
LOAD_S = 600.0
"""Seconds that loading all tasks may take."""
CLOSE_S = 10.0
"""Seconds that the last environments may take to close before their processes are killed."""


class EnvironmentFailed(Exception):
    """The environment of an episode failed, so the episode is missing."""


@dataclass(eq=False)
class EnvironmentWorker:
    """One worker, and the call that it does."""

    pool: WorkerPool
    num_episodes: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call(self, call: str, *arguments: Any, timeout_s: float, expected: Worker | None) -> tuple[Any, Worker]:
        """Returns the result, and the worker that has computed it.

        Raises:
            WorkerEnded: The worker died or took too long during this call.
            WorkerReplaced: Another worker has come since, so it must be told of the episode first.
        """
        async with self.lock, self.pool.share() as job:
            if expected is not None and job.worker is not expected:
                job.is_done = True
                raise WorkerReplaced(job.worker)
            try:
                async with asyncio.timeout(timeout_s):
                    await job.send({"type": "job", "call": call, "arguments": arguments})
                    answer = await job.receive()
            except BaseException as error:
                if isinstance(error, WorkerEnded):
                    raise
                self.pool.end_worker(job.worker, f"its {call} was not finished after {timeout_s:g} s")
                if isinstance(error, TimeoutError):
                    raise WorkerEnded(job.worker.end) from None
                raise
            job.is_done = True
            if answer["type"] == "failed":
                raise load_error(answer["error"])
            return answer["result"], job.worker


class WorkerReplaced(Exception):
    def __init__(self, worker: Worker):
        super().__init__("the worker was replaced")
        self.worker = worker


class EnvironmentHost:
    """The environments of a run.

    Args:
        type_name: The environment's `_type`.
    """

    def __init__(self, config: EnvironmentConfig, type_name: str, project_root: Path):
        self.config, self.name = config, f"{type_name}:{getattr(config, config.main_key, '')}".removesuffix(":")
        settings = config.model_dump(mode="json", by_alias=True)
        spec = {"type": type_name, "settings": settings, "memory_mb": config.memory_mb}
        self.places = [
            EnvironmentWorker(WorkerPool(spec, project_root, LOADER, name=self.name)) for _ in range(config.num_workers)
        ]
        self.loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._closing = set[asyncio.Task[None]]()
        self._items: list[EvalInputItem] | None = None
        self._told = set[str]()

    async def load(self) -> list[EvalInputItem]:
        """Returns the tasks; a `ConfigError` says why there are none."""
        if self._items is None:
            try:
                answer, _ = await self.places[0].call("load", timeout_s=LOAD_S, expected=None)
            except ConfigError as error:
                problems = [replace(each, path=f"environment.{each.path}") for each in error.problems]
                raise ConfigError(problems) from None
            except WorkerEnded as end:
                raise ConfigError(Problem("environment", f"the process of {self.name} failed: {end}")) from None
            if "error" in answer:
                message = f"{self.name} cannot load its tasks: {show(load_error(answer['error']))}"
                raise ConfigError(Problem("environment", message))
            self._items = [load_item(item) for item in answer["value"]]
        return list(self._items)

    def open(self) -> OpenEnvironment:
        place = min(self.places, key=lambda each: each.num_episodes)
        return OpenEnvironment(self, place, next(self._numbers))

    def close_episode(self, closing: Coroutine[Any, Any, None]) -> None:
        """Ends an episode's environment beside the run, which does not wait for it."""
        task = self.loop.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def report(self, error: BaseException, trace: str) -> None:
        """Warns about an error of the environment, once."""
        if (text := f"{type(error).__name__}: {show(error)}") not in self._told:
            self._told.add(text)
            logger.warning("the environment %s failed, so the episode is missing: %s\n%s", self.name, text, trace)

    async def close(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)
        for place in self.places:
            await place.pool.close()


class OpenEnvironment:
    """One episode's environment in a worker; it is played again where another worker must take over."""

    def __init__(self, host: EnvironmentHost, place: EnvironmentWorker, number: int):
        self.host, self.place, self.number = host, place, number
        self._played: list[tuple[str, tuple[Any, ...], Any]] = []
        self._worker: Worker | None = None
        place.num_episodes += 1

    async def reset(self, item: Message, seed: int) -> Message:
        self._played.clear()
        self._worker = None
        return await self._play("reset", self.number, item, seed)

    async def step(self, reply: Message) -> Message:
        return await self._play("step", self.number, reply)

    def close(self) -> None:
        self.place.num_episodes -= 1
        if self._worker is not None and self._worker.is_alive:
            self.host.close_episode(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(WorkerEnded, WorkerReplaced, Exception):  # its error was reported
            await self._call("close", self.number)

    async def _play(self, call: str, *arguments: Any) -> Message:
        while True:
            try:
                result = await self._call(call, *arguments)
            except WorkerReplaced as replaced:
                await self._play_again(replaced.worker)
                continue
            except WorkerEnded as end:
                error = EnvironmentFailed(f"the environment's process failed during {call}: {end}")
                self.host.report(error, "")
                raise error from None
            self._played.append((call, arguments, result))
            return result

    async def _play_again(self, worker: Worker) -> None:
        """Brings a new worker to where the one before was."""
        self._worker = worker
        for call, arguments, result in self._played:
            again = await self._call(call, *arguments)
            if again != result:
                raise EnvironmentFailed("its process was replaced, and played again it differed: it is not repeatable")

    async def _call(self, call: str, *arguments: Any) -> Message:
        timeout_s, expected = self.host.config.step_timeout_s, self._worker
        answer, self._worker = await self.place.call(call, *arguments, timeout_s=timeout_s, expected=expected)
        if "error" not in answer:
            return answer["value"]
        error = load_error(answer["error"])
        if not isinstance(error, PolicyFailure):
            self.host.report(error, answer["trace"])
        raise error


@asynccontextmanager
async def open_host(config: EnvironmentConfig, type_name: str, project_root: Path) -> AsyncIterator[EnvironmentHost]:
    host = EnvironmentHost(config, type_name, project_root)
    try:
        yield host
    finally:
        await host.close()
