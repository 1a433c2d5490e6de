"""An environment by one name: what its episodes record, and that whatever it does costs one episode."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

import reinforge
from reinforge.config.loader import load_config
from reinforge.environments.session import bind_environment
from reinforge.errors import ConfigError
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments import playing
from tests.environments.games import Dice
from tests.environments.playing import LocalHost, report, rewards
from tests.episodes import make_runner, run_items
from tests.processes import find_children

GAMES = Path(__file__).with_name("games.py")


def opened(folder, environment=None, workflow=None, **arguments):
    """Returns the context of a project's workflow and the tasks of its environment, which is in a worker."""
    shutil.copy(GAMES, folder / "games.py")
    block = {"_type": "python", "source": "games:Dice", "arguments": arguments, "step_timeout_s": 5, "num_workers": 1}
    sections = {"environment": {**block, **(environment or {})}, **({"workflow": workflow} if workflow else {})}
    return playing.opened(folder, **sections)


async def play(folder, script=lambda request: "six", environment=None, workflow=None, ids=None, **arguments):
    async with opened(folder, environment, workflow, **arguments) as (agent, items):
        chosen = [item for item in items if ids is None or item.id in ids]
        return await run_items(make_runner(agent, ScriptedPolicy(script), seed=0), chosen)


async def play_here(agent, kind="plain"):
    """Plays one episode of another agent, with the environment in this process."""
    host = LocalHost(Dice([kind]))
    runner = make_runner(bind_environment(bind_workflow(agent), host), ScriptedPolicy(lambda request: "six"))
    return (await run_items(runner, await host.load()))[0]


def rolls(record):
    return record.calls[-1].request.messages[-1]["content"]


async def test_rewards_of_the_steps_are_kept_and_their_sum_is_reported(tmp_path):
    answers = iter(["six", "one", "six"])
    async with opened(tmp_path) as (agent, items):
        runner = make_runner(agent, ScriptedPolicy(lambda request: next(answers)))
        runner.prompts = {"system": "Roll."}
        [record] = await run_items(runner, items)
    assert (record.outcome, len(record.calls)) == (Outcome.OK, 3)
    assert rewards(record) == [1.0, 0.0, 1.0]
    assert report(record).items() >= {"reward": 2.0, "num_steps": 3.0}.items()
    assert "name" not in report(record)
    assert record.calls[0].request.messages[0] == {"role": "system", "content": "Roll."}, "a prompt replaces the text"
    assert runner.texts == {"system": ""}


FAILURES = {
    "raises-0": "the board broke",
    "raises-1": "the board broke",
    "fails_at_reset-0": "no board",
    "hangs-0": "not finished after 1 s",
    "exits-0": "exited with code 7",
    "leaves-0": "the game is over",
    "nan-0": "reward nan",
    "floods-0": "MemoryError",
}


@pytest.mark.slow
async def test_a_failure_of_an_environment_costs_its_own_episode_and_is_reported_once(tmp_path, caplog):
    """All in one process; where it is replaced the others are played again. They use Python's global generator."""
    limits = {"memory_mb": 2048, "step_timeout_s": 1}
    kinds = [*dict.fromkeys(name.partition("-")[0] for name in FAILURES), "plain"]
    good = [f"plain-{number}" for number in range(6)]
    with caplog.at_level(logging.WARNING):
        records = await play(tmp_path, environment=limits, kinds=kinds, count=6, ids=[*FAILURES, *good])
    found = {record.key.example_id: record for record in records}
    for name, reason in FAILURES.items():
        assert (found[name].outcome, reason in found[name].reason) == (Outcome.TOOL_ERROR, True), found[name].reason
    assert {found[name].outcome for name in good} == {Outcome.OK}, [found[name].reason for name in good]
    undisturbed = await play(tmp_path, environment={"num_workers": 2}, count=6)
    assert [rolls(found[name]) for name in good] == [rolls(record) for record in undisturbed]
    assert len({rolls(record) for record in undisturbed}) > 1
    [told] = [record.message for record in caplog.records if "the board broke" in record.message]
    assert "games.py" in told
    assert "Traceback" in told


@pytest.mark.slow
async def test_an_episode_that_never_ends_is_cut_at_max_turns(tmp_path):
    workflow = {"_type": "environment", "max_turns": 5}
    endless, illegal = await play(tmp_path, workflow=workflow, kinds=["endless", "illegal"])
    assert (endless.outcome, len(endless.calls), "max_turns" in endless.reason) == (Outcome.POLICY_ERROR, 5, True)
    assert (illegal.outcome, illegal.reason) == (Outcome.POLICY_ERROR, "illegal move"), "the policy's failure"


async def test_any_agent_plays_the_environment():
    async def agent(item, llm, context):
        observation = await context.environment.reset()
        while True:
            reply = await llm.chat.completions.create(messages=observation.messages)
            result = await context.environment.step(reply.choices[0].message)
            observation = result.observation
            if result.done:
                return result.info["last"]

    def plain(item, llm, context):
        observation = context.environment.reset()
        while True:
            reply = llm.chat.completions.create(messages=observation.messages)
            result = context.environment.step(reply.choices[0].message)
            observation = result.observation
            if result.done:
                return result.info["last"]

    records = [await play_here(each) for each in (agent, plain)]
    assert [(record.outcome, len(record.calls)) for record in records] == [(Outcome.OK, 3)] * 2
    assert records[0].item.output_obj == records[1].item.output_obj
    assert 1 <= records[0].item.output_obj <= 6


async def test_an_agent_that_swallows_the_failure_is_missing_all_the_same():
    async def agent(item, llm, context):
        await context.environment.reset()
        await llm.chat.completions.create(messages=[{"role": "user", "content": "go"}])
        with pytest.raises(RuntimeError):
            await context.environment.step("six")
        return "fine"

    record = await play_here(agent, "raises")
    assert (record.outcome, "the board broke" in record.reason) == (Outcome.TOOL_ERROR, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("reasoning_gim:spell_backward", 'no environment named "reasoning_gim", did you mean "reasoning_gym"?'),
        ({"_type": "python", "source": "games:Dise"}, "Dise"),
        ({"_type": "python", "source": "games:Dice", "sead": 1}, "sead"),
    ],
)
async def test_a_wrong_name_is_refused_before_any_work(tmp_path, block, message):
    shutil.copy(GAMES, tmp_path / "games.py")
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"environment": block}))
    with pytest.raises(ConfigError, match=message) as caught:
        async with ComponentBuilder(load_config(tmp_path / "run.yml")) as builder:
            await builder.get_dataset()
    assert all(problem.path.startswith("environment") for problem in caught.value.problems)


def test_overrides_reach_what_a_name_stands_for(tmp_path):
    """As `-o` on the command line: `--environment python:games:Dice -o environment.num_workers 1`."""
    given = [
        ("environment", "python:games:Dice"),
        ("environment.num_workers", "1"),
        ("workflow.max_turns", "5"),
        ("trajectory_builders.builder.num_generations", "4"),
    ]
    config = load_config(None, overrides=given).config
    assert (config.environment.source, config.environment.num_workers) == ("games:Dice", 1)
    assert (config.workflow.static_type, config.workflow.max_turns) == ("environment", 5)
    assert config.trajectory_builders["builder"].num_generations == 4
    assert config.finetuning.trajectory_builder == "builder"


@pytest.mark.slow
async def test_what_an_environment_starts_and_prints_stays_its_own(tmp_path, capfd):
    """One whose reset fails is closed then; what is open at the end of a run is killed with its worker."""
    async with opened(tmp_path, kinds=["child_fails", "prints", "child"]) as (agent, items):
        runner = make_runner(agent, ScriptedPolicy(lambda request: "six"))
        records = await run_items(runner, items[:2])
        assert await wait_for(find_sleepers()) == []
        records += await run_items(runner, items[2:])
        sleepers = find_sleepers()
    assert [record.outcome for record in records] == [Outcome.TOOL_ERROR, Outcome.OK, Outcome.OK]
    assert len(sleepers) == 1
    assert await wait_for(sleepers) == []
    assert capfd.readouterr() == ("", "a package prints\n" * 3)


def find_sleepers():
    """Returns the children of environments that still run."""
    return find_children("sleep(600)")


async def wait_for(processes):
    """Returns those that do not end."""
    return (await asyncio.to_thread(psutil.wait_procs, processes, timeout=10))[1]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path):
    shutil.copy(GAMES, tmp_path / "games.py")
    block = {"_type": "python", "source": "games:Dice", "arguments": {"kinds": ["child"]}}
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"environment": block}))
    program = """
import asyncio
from reinforge.config.loader import load_config
from reinforge.environments.host import open_host
from reinforge.rollout.isolation.worker_protocol import dump_item

async def main():
    loaded = load_config("run.yml")
    async with open_host(loaded.config.environment, "python", loaded.project_root) as host:
        items = await host.load()
        await host.open().reset(dump_item(items[0]), 0)
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2  # a worker, and the child of its environment
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert psutil.wait_procs(started, timeout=10)[1] == []
    process.stdout.close()


def test_finetune_takes_an_environment_in_place_of_agent_data_and_reward():
    with pytest.raises(TypeError, match="missing the arguments workflow, dataset, reward; or pass environment="):
        reinforge.finetune(model="bundled:tickets")
    with pytest.raises(TypeError, match="missing the arguments model"):
        reinforge.finetune(environment="python:games:Dice")
    with pytest.raises(ConfigError, match="no environment named"):
        reinforge.finetune(environment="pithon:games:Dice", model="bundled:tickets")
