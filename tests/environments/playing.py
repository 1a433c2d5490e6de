"""Plays the configured environment with a scripted policy, in its workers or in this process."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import yaml

from reinforge.config.loader import load_config
from reinforge.environments.worker import Host, WorkerBuilder
from reinforge.registry import REGISTRY
from reinforge.trainer.setup.components import ComponentBuilder
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import make_runner, run_items


@asynccontextmanager
async def opened(folder, make_builder=ComponentBuilder, **sections):
    (folder / "run.yml").write_text(yaml.safe_dump(sections))
    async with make_builder(load_config(folder / "run.yml")) as builder:
        yield await builder.get_workflow(), (await builder.get_dataset()).load()


@asynccontextmanager
async def opened_here(folder, **sections):
    """The same without a worker, whose start costs more than an episode."""
    async with loaded_source(folder, **sections) as (loaded, source), LocalBuilder(loaded, source) as builder:
        yield await builder.get_workflow(), (await builder.get_dataset()).load()


@asynccontextmanager
async def loaded_source(folder, **sections):
    """Yields the configuration and its environment's source, which a worker has otherwise."""
    (folder / "run.yml").write_text(yaml.safe_dump(sections))
    loaded = load_config(folder / "run.yml")
    factory = asynccontextmanager(REGISTRY.get("environment", loaded.types["environment",]).factory)
    async with factory(loaded.config.environment, WorkerBuilder(loaded.project_root)) as source:
        yield loaded, source


class LocalBuilder(ComponentBuilder):
    def __init__(self, loaded, source):
        super().__init__(loaded)
        self.host = LocalHost(source)

    async def get_environment(self):
        return self.host


class LocalHost:
    """Has the environments of a source in this process, with the methods of `EnvironmentHost`; one acts at a time."""

    def __init__(self, source):
        self.worker, self.lock = Host(source, None), asyncio.Lock()
        self.loop, self._numbers = asyncio.get_running_loop(), itertools.count()

    async def load(self):
        return self.worker.source.load()

    def open(self):
        return LocalEnvironment(self, next(self._numbers))


class LocalEnvironment:
    def __init__(self, host, number):
        self.host, self.number = host, number

    async def reset(self, item, seed):
        async with self.host.lock:
            return await self.host.worker.reset(self.number, item, seed)

    async def step(self, reply):
        async with self.host.lock:
            return await self.host.worker.step(self.number, reply)

    def close(self):
        self.closing = self.host.loop.create_task(self.host.worker.close(self.number))


async def play(folder, environment, script, *, rival=None, generations=1, concurrency=8, open_=opened, **sections):
    async with open_(folder, environment={"size": 4, **environment}, **sections) as (agent, items):
        models = {"agent": PolicyModel(ScriptedPolicy(script))} | ({"rival": PolicyModel(rival)} if rival else {})
        return await run_items(make_runner(agent, llms=models, concurrency=concurrency), items, generations=generations)


def transcript(record):
    return [(call.llm, call.request.messages, call.reply.message) for call in record.calls], record.marks[-1].data


def rewards(record):
    """The rewards of the steps."""
    return [mark.step_reward for mark in record.marks if mark.step_reward is not None]


def report(record):
    """The reward that the episode reported, with its metrics; None: it reported none."""
    found = [mark.data["reported_reward"] for mark in record.marks if "reported_reward" in (mark.data or {})]
    return found[0] if found else None
