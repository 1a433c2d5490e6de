"""An environment by one name: what its episodes record, and that whatever it does costs one episode."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

import reinforge
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.rollout.episode import build_steps
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.episodes import make_runner, run_items

GAMES = Path(__file__).with_name("games.py")


@contextlib.asynccontextmanager
async def opened(folder, environment=None, workflow=None, **arguments):
    """Yields a project's workflow and the tasks of its environment."""
    shutil.copy(GAMES, folder / "games.py")
    block = {
        "_type": "python",
        "source": "games:Dice",
        "arguments": arguments,
        "step_timeout_s": 5,
        **(environment or {}),
    }
    sections = {"environment": block, **({"workflow": workflow} if workflow else {})}
    (folder / "run.yml").write_text(yaml.safe_dump(sections))
    async with ComponentBuilder(load_config(folder / "run.yml")) as builder:
        yield await builder.get_workflow(), (await builder.get_dataset()).load()


async def play(folder, script=lambda request: "six", environment=None, workflow=None, seed=0, **arguments):
    async with opened(folder, environment, workflow, **arguments) as (agent, items):
        return await run_items(make_runner(agent, ScriptedPolicy(script), seed=seed), items)


async def test_a_prompt_replaces_the_system_text(tmp_path):
    async with opened(tmp_path) as (agent, items):
        runner = make_runner(agent, ScriptedPolicy(lambda request: "six"))
        runner.prompts = {"system": "Roll."}
        [record] = await run_items(runner, items)
    assert record.calls[0].request.messages[0] == {"role": "system", "content": "Roll."}
    assert runner.texts == {"system": ""}


def rolls(record):
    return record.calls[-1].request.messages[-1]["content"]


async def test_rewards_of_the_steps_are_kept_and_their_sum_is_reported(tmp_path):
    answers = iter(["six", "one", "six"])
    [record] = await play(tmp_path, lambda request: next(answers))
    assert record.outcome is Outcome.OK
    assert len(record.calls) == 3
    assert [mark.step_reward for mark in record.marks if mark.step_reward is not None] == [1.0, 0.0, 1.0]
    reports = [step.payload.data.payload for step in build_steps(record) if isinstance(step.payload.data.payload, dict)]
    [report] = [each["reported_reward"] for each in reports if "reported_reward" in each]
    assert report["reward"] == 2.0
    assert report["num_steps"] == 3.0
    assert "name" not in report


async def test_equal_seeds_roll_equal_dice_however_the_episodes_interleave(tmp_path):
    """The environment uses Python's global generator, and 12 episodes share two processes."""
    first = await play(tmp_path, count=12)
    again = await play(tmp_path, environment={"num_workers": 1}, count=12)
    assert [rolls(record) for record in first] == [rolls(record) for record in again]
    assert len({rolls(record) for record in first}) > 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raises", "the board broke"),
        ("fails_at_reset", "no board"),
        ("hangs", "not finished after 1 s"),
        ("exits", "exited with code 7"),
        ("leaves", "the game is over"),
        ("nan", "reward nan"),
        ("floods", "MemoryError"),
    ],
)
async def test_a_failure_of_an_environment_costs_its_own_episode(tmp_path, kind, reason, caplog):
    limits = {"num_workers": 1, "memory_mb": 2048, "step_timeout_s": 1}
    with caplog.at_level(logging.WARNING):
        bad, *good = await play(tmp_path, environment=limits, kinds=[kind, "plain"], count=1)
    assert bad.outcome is Outcome.TOOL_ERROR
    assert reason in bad.reason
    assert [record.outcome for record in good] == [Outcome.OK]
    undisturbed = await play(tmp_path, kinds=["unused", "plain"], count=1)
    assert rolls(good[0]) == rolls(undisturbed[1])  # the others are played again in the new process


async def test_a_failure_is_reported_once_with_its_trace(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        await play(tmp_path, kinds=["raises"], count=3)
    found = [record.message for record in caplog.records if "the board broke" in record.message]
    assert len(found) == 1
    assert "games.py" in found[0]
    assert "Traceback" in found[0]


async def test_an_illegal_move_is_the_policys_failure(tmp_path):
    [record] = await play(tmp_path, kinds=["illegal"])
    assert record.outcome is Outcome.POLICY_ERROR
    assert record.reason == "illegal move"


async def test_what_a_package_prints_is_not_in_the_output_of_the_run(tmp_path, capfd):
    await play(tmp_path, kinds=["prints"])
    assert capfd.readouterr() == ("", "a package prints\n" * 3)


async def test_an_episode_that_never_ends_is_cut_at_max_turns(tmp_path):
    [record] = await play(tmp_path, workflow={"_type": "environment", "max_turns": 5}, kinds=["endless"])
    assert record.outcome is Outcome.POLICY_ERROR
    assert len(record.calls) == 5
    assert "max_turns" in record.reason


@pytest.mark.parametrize("is_async", [True, False])
async def test_any_workflow_plays_the_environment(tmp_path, is_async):
    keyword, wait = ("async def", "await ") if is_async else ("def", "")
    name = f"agent_{keyword[:3].strip()}"
    (tmp_path / f"{name}.py").write_text(
        f"""
{keyword} agent(item, llm, context):
    observation = {wait}context.environment.reset()
    while True:
        reply = {wait}llm.chat.completions.create(messages=observation.messages)
        result = {wait}context.environment.step(reply.choices[0].message)
        observation = result.observation
        if result.done:
            return result.info["last"]
"""
    )
    [record] = await play(tmp_path, workflow={"_type": "python", "function": f"{name}:agent"})
    assert record.outcome is Outcome.OK
    assert len(record.calls) == 3
    assert 1 <= record.item.output_obj <= 6


async def test_an_agent_that_swallows_the_failure_is_missing_all_the_same(tmp_path):
    (tmp_path / "swallows.py").write_text(
        """
async def agent(item, llm, context):
    await context.environment.reset()
    await llm.chat.completions.create(messages=[{"role": "user", "content": "go"}])
    try:
        await context.environment.step("six")
    except Exception:
        return "fine"
"""
    )
    [record] = await play(tmp_path, workflow={"_type": "python", "function": "swallows:agent"}, kinds=["raises"])
    assert record.outcome is Outcome.TOOL_ERROR
    assert "the board broke" in record.reason


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("reasoning_gim:spell_backward", 'no environment named "reasoning_gim", did you mean "reasoning_gym"?'),
        ({"_type": "python", "source": "games:Dise"}, "Dise"),
        ({"_type": "python", "source": "games:GAMES"}, "GAMES"),
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


async def test_a_process_of_an_environment_is_closed_with_its_episode_or_killed_with_the_run(tmp_path):
    async with opened(tmp_path, kinds=["child"]) as (agent, items):
        [record] = await run_items(make_runner(agent, ScriptedPolicy(lambda request: "six")), items)
        assert record.outcome is Outcome.OK
    deadline = time.monotonic() + 10
    while [each for each in psutil.Process().children(recursive=True) if "sleep(600)" in " ".join(each.cmdline())]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_an_environment_whose_reset_fails_is_closed(tmp_path):
    async with opened(tmp_path, kinds=["child_fails"]) as (agent, items):
        [record] = await run_items(make_runner(agent, ScriptedPolicy()), items)
        assert record.outcome is Outcome.TOOL_ERROR
        deadline = time.monotonic() + 10
        while any(is_sleeper(process) for process in psutil.Process().children(recursive=True)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def is_sleeper(process):
    """Whether the child of an environment still runs; one that ends between the listing and the reading does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "sleep(600)" in " ".join(process.cmdline())
    return False


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
