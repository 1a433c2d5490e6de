"""The workers of a run in which environments run, apart from the run's own process.

A worker does one call after the other; where its environments are concurrent, it does them all at once. One that hangs,
dies or needs too much memory is replaced: the episode whose call it was is missing, and the others are played again up
to where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem, show
from reinforge.rollout.isolation.containment import WorkerEnded
from reinforge.rollout.isolation.worker_pool import ProcessTransport, Worker, WorkerPool
from reinforge.rollout.isolation.worker_protocol import Message, load_error, load_item
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)

LOADER = "reinforge.environments.worker:load_source"
LOAD_S = 600.0  # seconds that loading all tasks may take
MAX_BATCH = 64  # calls that are sent to a worker at once
CLOSE_S = 10.0  # seconds that the last environments may take to close before their processes are killed


class EnvironmentFailed(Exception):
    """The environment of an episode failed, so the episode is missing."""


class WorkerReplaced(Exception):
    """Another worker has come, which must be told of the episode first.

    Attributes:
        alone: The worker before it failed at a batch with this call, so the call is made alone now.
    """

    def __init__(self, worker: Worker, *, alone: bool):
        super().__init__("the worker was replaced")
        self.worker, self.alone = worker, alone


@dataclass(eq=False)
class Call:
    """A call that waits for its worker, which has computed the calls of the episode before; None: any may do it."""

    name: str
    arguments: tuple[Any, ...]
    expected: Worker | None
    alone: bool
    result: asyncio.Future[tuple[Any, Worker]]


class EnvironmentWorker:
    """One worker; what waits is sent in batches, since a message costs more than most calls.

    Args:
        is_concurrent: Send each call at once and alone instead, beside those before it.
    """

    def __init__(self, pool: WorkerPool, *, is_concurrent: bool):
        self.pool, self.is_concurrent, self.num_episodes = pool, is_concurrent, 0
        self._waiting = deque[Call]()
        self._sending = set[asyncio.Task[None]]()

    async def call(
        self, name: str, *arguments: Any, timeout_s: float, expected: Worker | None, alone: bool = False
    ) -> tuple[Any, Worker]:
        """Returns the result, and the worker that has computed it.

        Raises:
            WorkerEnded: The worker died or took too long during this call.
            WorkerReplaced: Another worker has come since.
        """
        result = asyncio.get_running_loop().create_future()
        self._waiting.append(Call(name, arguments, expected, alone or self.is_concurrent, result))
        if self.is_concurrent or all(each.done() for each in self._sending):
            sending = asyncio.create_task(self._send_all(timeout_s))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return await result

    async def _send_all(self, timeout_s: float) -> None:
        while self._waiting:
            batch = [self._waiting.popleft()]
            while self._waiting and len(batch) < MAX_BATCH and not (batch[0].alone or self._waiting[0].alone):
                batch.append(self._waiting.popleft())
            try:
                await self._send(batch, timeout_s)
            except Exception as error:  # noqa: BLE001  each caller gets it
                for call in batch:
                    _settle(call, error)

    async def _send(self, batch: Sequence[Call], timeout_s: float) -> None:
        async with self.pool.share() as job:
            worker = job.worker
            calls = [call for call in batch if call.expected in (None, worker)]
            for call in batch:
                if call not in calls:
                    _settle(call, WorkerReplaced(worker, alone=call.alone))
            if not calls:
                job.is_done = True
                return
            sent = [[call.name, call.arguments] for call in calls]
            try:
                async with asyncio.timeout(timeout_s):
                    await job.send({"type": "job", "calls": sent})
                    answer = await job.receive()
                job.is_done = True
            except (WorkerEnded, TimeoutError) as error:
                end = error
                if isinstance(error, TimeoutError):
                    self.pool.end_worker(worker, f"{calls[0].name} was not finished after {timeout_s:g} s")
                    end = WorkerEnded(worker.end)
        if not job.is_done:
            await self._handle_end(calls, end, timeout_s)
        elif answer["type"] == "failed":
            raise load_error(answer["error"])
        else:
            for call, value in zip(calls, answer["result"], strict=True):
                _settle(call, (value, worker))

    async def _handle_end(self, calls: Sequence[Call], end: BaseException, timeout_s: float) -> None:
        """One of the calls has ended the worker: which one shows when they are made alone."""
        if len(calls) == 1:
            _settle(calls[0], end)
            return
        for call in calls:
            call.alone = True
            await self._send([call], timeout_s)


def _settle(call: Call, value: Any) -> None:
    if call.result.done():  # its episode has ended
        return
    if isinstance(value, BaseException):
        call.result.set_exception(value)
    else:
        call.result.set_result(value)


class EnvironmentHost:
    """The environments of a run; `type_name` is their `_type`."""

    def __init__(self, config: EnvironmentConfig, type_name: str, project_root: Path):
        self.config, self.name = config, f"{type_name}:{getattr(config, config.main_key, '')}".removesuffix(":")
        settings = config.model_dump(mode="json", by_alias=True)
        spec = {"type": type_name, "settings": settings, "memory_mb": config.memory_mb}
        start = partial(ProcessTransport.start, config.find_interpreter(project_root))
        self.places = [
            EnvironmentWorker(
                WorkerPool(spec, project_root, LOADER, name=self.name, open_transport=start),
                is_concurrent=config.is_concurrent,
            )
            for _ in range(config.num_workers)
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
        self._is_closed = True
        place.num_episodes += 1

    async def reset(self, item: Message, seed: int) -> Message:
        self._played.clear()
        self._worker, self._is_closed = None, False  # also a reset that fails may have started something
        return await self._play("reset", self.number, item, seed)

    async def step(self, reply: Message) -> Message:
        return await self._play("step", self.number, reply)

    def close(self) -> None:
        self.place.num_episodes -= 1
        if not self._is_closed and self._worker is not None and self._worker.is_alive:
            self.host.close_episode(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):  # an error of its own was reported; a worker that has ended has closed it
            await self._call("close", self.number)

    async def _play(self, call: str, *arguments: Any) -> Message:
        alone = is_behind = False
        while True:
            try:
                if is_behind:
                    await self._play_again()
                    is_behind = False
                result = await self._call(call, *arguments, alone=alone)
            except WorkerReplaced as replaced:  # also while it was played again
                self._worker, is_behind, alone = replaced.worker, True, alone or replaced.alone
                continue
            except WorkerEnded as end:
                error = EnvironmentFailed(f"the environment's process failed during {call}: {end}")
                self.host.report(error, "")
                raise error from None
            self._played.append((call, arguments, result))
            self._is_closed = result.pop("is_closed", False)
            return result

    async def _play_again(self) -> None:
        """Brings a new worker to where the one before was."""
        for call, arguments, result in self._played:
            again = await self._call(call, *arguments)
            again.pop("is_closed", None)
            if again != result:
                raise EnvironmentFailed("its process was replaced, and played again it differed: it is not repeatable")

    async def _call(self, call: str, *arguments: Any, alone: bool = False) -> Message:
        config, expected = self.host.config, self._worker
        timeout_s = config.step_timeout_s * (2 if config.is_concurrent else 1)  # the worker ends such a call itself
        answer, self._worker = await self.place.call(
            call, *arguments, timeout_s=timeout_s, expected=expected, alone=alone
        )
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
