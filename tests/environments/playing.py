"""Plays the configured environment with a scripted policy."""

from contextlib import asynccontextmanager

import yaml

from reinforge.config.loader import load_config
from reinforge.trainer.setup.components import ComponentBuilder
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import make_runner, run_items


@asynccontextmanager
async def opened(folder, **sections):
    (folder / "run.yml").write_text(yaml.safe_dump(sections))
    async with ComponentBuilder(load_config(folder / "run.yml")) as builder:
        yield await builder.get_workflow(), (await builder.get_dataset()).load()


async def play(folder, environment, script, *, rival=None, generations=1, concurrency=8, **sections):
    async with opened(folder, environment={"size": 4, **environment}, **sections) as (agent, items):
        models = {"agent": PolicyModel(ScriptedPolicy(script))} | ({"rival": PolicyModel(rival)} if rival else {})
        return await run_items(make_runner(agent, llms=models, concurrency=concurrency), items, generations=generations)


def transcript(record):
    return [(call.llm, call.request.messages, call.reply.message) for call in record.calls], record.marks[-1].data
