"""Harbor's task folders, played by our agent and by a program, in processes of this machine."""

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.reported_reward import ReportedReward, ReportedRewardConfig
from reinforge.rollout.episode import with_steps
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.episodes import make_runner, run_items

TASKS = Path(__file__).parents[1] / "data" / "harbor"


@pytest.fixture
def tasks(tmp_path):
    shutil.copytree(TASKS, tmp_path / "tasks")
    return tmp_path / "tasks"


@asynccontextmanager
async def opened(tasks, **settings):
    """Yields the workflow and the tasks of a configuration with nothing but the environment."""
    block = {"_type": "harbor", "folder": "tasks", "sandbox": "process", "num_workers": 1, **settings}
    (tasks.parent / "run.yml").write_text(yaml.safe_dump({"environment": block}))
    async with ComponentBuilder(load_config(tasks.parent / "run.yml")) as builder:
        items = (await builder.get_dataset()).load()
        yield await builder.get_workflow(), items


class ShellPolicy(ScriptedPolicy):
    """Calls bash with each line of a script in turn, then says that it is done."""

    async def sample(self, request):
        reply = await super().sample(request)
        command = str(reply.message["content"])
        if command == "done":
            return reply
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        calls = [{"id": "1", "type": "function", "function": function}]
        return replace(reply, message={"role": "assistant", "content": None, "tool_calls": calls})


def outputs(request):
    return [message["content"] for message in request.messages if message["role"] == "tool"]


def run_lines(*lines):
    """Returns a script of commands, which may use what the one before has printed."""

    def script(request):
        seen = outputs(request)
        return [*lines, "done"][len(seen)].replace("LAST", seen[-1].strip() if seen else "")

    return script


async def play(tasks, script, name, **settings):
    async with opened(tasks, **settings) as (agent, items):
        chosen = [item for item in items if item.id == name]
        (record,) = await run_items(make_runner(agent, ShellPolicy(script), timeout_s=60), chosen)
    return record


async def score(record, metric="reward"):
    assert record.outcome is Outcome.OK, record.reason
    result = await ReportedReward(ReportedRewardConfig(metric=metric)).evaluate(with_steps(record))
    return result.score if result.error is None else result.error


NEXT = ["cat number.txt", "echo $((LAST + 1)) > /app/next.txt"]
PLAYED = [
    ("hello", ["echo hello > greeting.txt"], 1.0),
    ("hello", ["echo goodbye > greeting.txt"], 0.0),
    ("two_turns", NEXT, 1.0),
    ("two_turns", ["ls"], 0.0),
    ("partial", ["sed -i s/-/+/ /app/add.sh"], 1.0),
    ("partial", [], 0.0),
]


@pytest.mark.parametrize(("name", "lines", "reward"), PLAYED)
async def test_our_agent_plays_and_the_tests_decide(tasks, name, lines, reward):
    record = await play(tasks, run_lines(*lines), name)
    assert (await score(record), await score(record, "solved")) == (reward, reward)
    assert len(record.calls) == len(lines) + 1
    if name == "two_turns":
        assert await score(record, "files") == 1 + (reward == 1.0)
        assert "canary" not in str(record.calls[0].request.messages), "a mark of the data is not shown"
    assert sorted(os.listdir(tasks / "hello")) == sorted(os.listdir(TASKS / "hello")), "the tasks stay as they are"


@pytest.mark.parametrize("name", ["hello", "two_turns", "partial"])
async def test_the_solution_of_each_task_is_right_and_the_agent_sees_neither_it_nor_the_tests(tasks, name):
    solution = (tasks / name / "solution" / "solve.sh").read_text()
    record = await play(tasks, run_lines(f"ls {tasks} /tests /logs/verifier", solution), name)
    assert await score(record) == 1.0
    listed = outputs(record.calls[-1].request)[0]
    assert listed.split() == ["/logs/verifier:", "/tests:", f"{tasks}:"], "the folders are empty for it"


async def test_a_program_is_the_agent_and_its_time_is_that_of_the_task(tasks):
    program = "import os, time; print(os.getcwd()); open('greeting.txt', 'w').write('hello'); time.sleep(SECONDS)"
    for seconds, limit in ((0, 60.0), (60, 0.5)):
        text = (tasks / "hello" / "task.toml").read_text()
        (tasks / "hello" / "task.toml").write_text(re.sub(r"60\.0|0\.5", str(limit), text))
        command = [sys.executable, "-c", program.replace("SECONDS", str(seconds))]
        record = await play(tasks, lambda request: "done", "hello", command=command)
        assert (await score(record), record.item.output_obj) == (1.0, "" if seconds else "/app")


async def test_what_a_command_did_wrong_is_told_to_the_policy(tasks):
    lines = ["sleep 60", "head -c 30000 /dev/zero | tr '\\0' x; exit 3", "cat nothing"]
    record = await play(tasks, run_lines(*lines), "hello", command_timeout_s=0.5)
    slow, long, failed = outputs(record.calls[-1].request)
    assert slow == "error: the command took more than 0.5 s"
    assert ("... (30000 characters)" in long, long.endswith("(exit code 3)"), len(long) < 11_000) == (True, True, True)
    assert failed == "cat: nothing: No such file or directory\n(exit code 1)"
    assert await score(record) == 0.0


async def test_an_agent_whose_time_is_over_is_scored(tasks):
    text = (tasks / "hello" / "task.toml").read_text()
    (tasks / "hello" / "task.toml").write_text(text.replace("60.0", "0.6"))
    record = await play(tasks, run_lines("echo hello > greeting.txt", "sleep 60", "rm greeting.txt"), "hello")
    assert (await score(record), len(record.calls)) == (1.0, 2)


REWARDS = [
    ("echo 0.25 > reward.txt", 0.25),
    ("echo '{\"share\": 0.5}' > reward.json; echo 1 > reward.txt", 0.5),
    ('echo \'{"a": 1, "b": 0}\' > reward.json', "reward.json has no number `reward`"),
    ("echo good > reward.txt", "reward.txt has no number `reward`"),
    ("echo nan > reward.txt", "nan"),
    ("kill -9 $$", "SIGKILL"),
    ("sleep 60", "took more than 0.5 s"),
]


@pytest.mark.parametrize(("script", "expected"), REWARDS)
async def test_how_the_reward_is_read_and_that_unknown_is_never_0(tasks, script, expected):
    (tasks / "hello/tests/test.sh").write_text(f"#!/bin/bash\ncd /logs/verifier; {script}\n")
    text = (tasks / "hello" / "task.toml").read_text()
    (tasks / "hello" / "task.toml").write_text(text.replace("30.0", "0.5" if "sleep" in script else "30.0"))
    record = await play(tasks, lambda request: "done", "hello")
    if isinstance(expected, float):
        assert await score(record) == expected
    else:
        assert (record.outcome, expected in record.reason) == (Outcome.TOOL_ERROR, True), record.reason


REFUSED = [
    ({"folder": "none"}, "there is no folder with a task.toml in"),
    ({"agent": "codexx"}, 'did you mean "codex"'),
    ({"path": "/work"}, "the working directory /app"),
    ("[[steps]]\nname = 'a'", "several steps"),
    ("[environment]\nos = 'Windows'", "another system than Linux"),
    ("[verifier.env]\nKEY = '${KEY}'", "variables of this machine"),
    ("[[environment]", "hello: Expected"),
    ("COPY data /app/", "COPY of more than files to /app"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
async def test_what_cannot_be_played_is_refused_before_work_starts(tasks, change, message):
    if isinstance(change, str):
        copied = change.startswith("COPY")
        file = tasks / "hello" / ("environment/Dockerfile" if copied else "task.toml")
        file.write_text(f"{file.read_text() if copied else ''}{change}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        await opened(tasks, **(change if isinstance(change, dict) else {})).__aenter__()


async def test_a_container_begins_with_the_images_files_and_sees_the_tests_at_the_end(tasks, monkeypatch):
    docker = tasks.parent / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tasks.parent}/calls\n[ "$3" != harbor-partial ]\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tasks.parent}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"build --tag harbor-partial .*tasks/partial/environment"):
        await opened(tasks, sandbox="container").__aenter__()
    shutil.rmtree(tasks / "partial")
    for settings in ({}, {"command": ["sh"]}):
        (tasks.parent / "calls").unlink()
        assert (
            await score(await play(tasks, lambda request: "done", "two_turns", sandbox="container", **settings)) == 1.0
        )
        runs = [line for line in (tasks.parent / "calls").read_text().splitlines() if line.startswith("run ")]
        first, last = runs[0], runs[-1]
        assert first.endswith(
            f"debian:stable-slim cp -a /app/. {tempfile.gettempdir()}/reinforge-{os.getuid()}/workspace"
        )
        assert ("workspace:/app" in first, "workspace:/app" in last) == (False, True)
        assert all(f"/reward-{n}:{place} " in last for n, place in enumerate(("/tests", "/logs/verifier")))
        assert "tasks" not in "".join(runs), "no folder of a task is mounted"
