"""The process in which environments run: it loads one source and does one call after the other.

Python's and NumPy's global random generators are swapped with each call, so that episodes do not disturb each other.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.interfaces import Environment, EnvironmentSource
from reinforge.registry import REGISTRY
from reinforge.rollout.isolation.worker import JobLink, Perform
from reinforge.rollout.isolation.worker_protocol import Message, dump_error, dump_item, load_item
from reinforge.types.environment import Reply, ToolUse


@dataclass(frozen=True)
class WorkerBuilder:
    """What the factory of an environment gets in place of the run's builder."""

    project_root: Path


async def load_source(spec: Message, project_root: Path) -> tuple[Perform, Message]:
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_DATA, (spec["memory_mb"] << 20,) * 2)
    os.dup2(2, 1)  # what a package prints must not stand between the lines of `--json`
    component = REGISTRY.get("environment", spec["type"])
    config = component.config_type.model_validate(spec["settings"])
    made = component.factory(config, WorkerBuilder(project_root))
    return Host(await anext(made), made).perform, {}


class LiveEnvironment:
    """An environment with its own state of the global random generators, which are its own inside `with episode:`."""

    def __init__(self, environment: Environment, seed: int):
        self.environment = environment
        if not environment.uses_global_random:
            return
        outside = _get_random_states()
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        self._states, self._outside = _get_random_states(), outside
        _set_random_states(outside)

    def __enter__(self) -> Environment:
        if self.environment.uses_global_random:
            self._outside = _get_random_states()
            _set_random_states(self._states)
        return self.environment

    def __exit__(self, *_: object) -> None:
        if self.environment.uses_global_random:
            self._states = _get_random_states()
            _set_random_states(self._outside)


def _get_random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set_random_states(states: tuple[Any, Any]) -> None:
    python, numpy = states
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


class Host:
    """The environments of the open episodes, by number."""

    def __init__(self, source: EnvironmentSource, made: Any):
        self.source, self.episodes = source, dict[int, LiveEnvironment]()
        self.made = made  # what the factory closes after its yield stays open until this process ends

    async def perform(self, job: Message, link: JobLink) -> Any:
        return [await self._do(name, arguments) for name, arguments in job["calls"]]

    async def _do(self, name: str, arguments: list[Any]) -> Message:
        try:
            return {"value": await getattr(self, name)(*arguments)}
        except BaseException as error:  # noqa: BLE001  also `SystemExit`: the run decides what it means
            return {"error": dump_error(error, is_final=True), "trace": traceback.format_exc(limit=-8)}

    async def load(self) -> list[Message]:
        return [dump_item(item) for item in self.source.load()]

    async def reset(self, number: int, item: Message, seed: int) -> Message:
        await self.close(number)  # of an agent that starts again
        episode = self.episodes[number] = LiveEnvironment(self.source.create(), seed)
        with episode as environment:
            return asdict(await environment.reset(load_item(item), seed))

    async def step(self, number: int, reply: Message) -> Message:
        with self.episodes[number] as environment:
            calls = [ToolUse(**call) for call in reply["tool_calls"]]
            result = await environment.step(Reply(reply["text"], calls))
        needs_close = type(environment).close is not Environment.close
        if is_closed := bool(result.done) and not needs_close:
            del self.episodes[number]
        return {**asdict(result), "is_closed": is_closed}

    async def close(self, number: int) -> None:
        if (episode := self.episodes.pop(number, None)) is not None:
            with episode as environment:
                await environment.close()
