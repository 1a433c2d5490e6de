"""Harbor's task folders, played by our agent and by a program, in processes of this machine."""

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from reinforge.errors import ConfigError
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments.playing import loaded_source, opened, opened_here, report
from tests.episodes import make_runner, run_items

TASKS = Path(__file__).parents[1] / "data" / "harbor"


@pytest.fixture
def tasks(tmp_path):
    shutil.copytree(TASKS, tmp_path / "tasks")
    return tmp_path / "tasks"


def build_block(**settings):
    return {"_type": "harbor", "folder": "tasks", "sandbox": "process", "num_workers": 1, **settings}


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


async def play(agent, items, name, lines=()):
    """Plays the task of this name with our agent and its commands, or with a program, which has none."""
    runner = make_runner(agent, ShellPolicy(run_lines(*lines)), timeout_s=60)
    return (await run_items(runner, [item for item in items if item.id == name]))[0]


def score(record, metric="reward"):
    assert record.outcome is Outcome.OK, record.reason
    return report(record)[metric]


def copy_task(tasks, name, **changes):
    """Copies the task `hello`; in `task.toml` the agent's and the tests' seconds are 60.0 and 30.0."""
    folder = shutil.copytree(TASKS / "hello", tasks / name)
    text = (folder / "task.toml").read_text()
    for old, new in {"60.0": changes.get("agent_s"), "30.0": changes.get("tests_s")}.items():
        text = text.replace(old, str(new or old))
    (folder / "task.toml").write_text(text)
    if "tests" in changes:
        (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\ncd /logs/verifier; {changes['tests']}\n")


REWARDS = {
    "number": ("echo 0.25 > reward.txt", 0.25),
    "json": ("echo '{\"share\": 0.5}' > reward.json; echo 1 > reward.txt", 0.5),
    "several": ('echo \'{"a": 1, "b": 0}\' > reward.json', "reward.json has no number `reward`"),
    "word": ("echo good > reward.txt", "reward.txt has no number `reward`"),
    "nan": ("echo nan > reward.txt", "nan"),
    "killed": ("kill -9 $$", "SIGKILL"),
    "slow": ("sleep 60", "took more than 0.5 s"),
}
NEXT = ["cat number.txt", "echo $((LAST + 1)) > /app/next.txt"]
PLAYED = {
    "wrong": ("hello", ["echo goodbye > greeting.txt"], 0.0),
    "two": ("two_turns", NEXT, 1.0),
    "none": ("two_turns", ["ls"], 0.0),
    "left": ("partial", [], 0.0),
}
WRONG = ["sleep 60", "head -c 30000 /dev/zero | tr '\\0' x; exit 3", "cat nothing"]
SOLVED = ("hello", "two_turns", "partial")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Everything that our agent plays, in one worker: the records by name, and the folder of the tasks."""
    tasks = shutil.copytree(TASKS, tmp_path_factory.mktemp("harbor") / "tasks")
    played = {name: (task, lines) for name, (task, lines, _) in PLAYED.items()}
    for name in SOLVED:
        solution = (TASKS / name / "solution" / "solve.sh").read_text()
        played[f"solved {name}"] = (name, [f"ls {tasks} /tests /logs/verifier", solution])
    for name, (tests, _) in REWARDS.items():
        copy_task(tasks, name, tests=tests, tests_s=0.5 if name == "slow" else 30.0)
        played[name] = (name, [])
    copy_task(tasks, "over", agent_s=0.6)
    played["over"] = ("over", ["echo hello > greeting.txt", "sleep 60", "rm greeting.txt"])
    played["mistakes"] = ("hello", WRONG)

    async def play_all():
        environment = build_block(command_timeout_s=2)
        async with opened(tasks.parent, environment=environment) as (agent, items):
            return {name: await play(agent, items, task, lines) for name, (task, lines) in played.items()}

    return {**asyncio.run(play_all()), "tasks": tasks}


@pytest.mark.parametrize("name", PLAYED)
def test_our_agent_plays_and_the_tests_decide(records, name):
    record, (task, lines, reward) = records[name], PLAYED[name]
    assert (score(record), score(record, "solved")) == (reward, reward)
    assert len(record.calls) == len(lines) + 1
    if task == "two_turns":
        assert score(record, "files") == 1 + (reward == 1.0)
        assert "canary" not in str(record.calls[0].request.messages), "a mark of the data is not shown"
    assert sorted(os.listdir(records["tasks"] / "hello")) == sorted(os.listdir(TASKS / "hello")), (
        "they stay as they are"
    )


@pytest.mark.parametrize("name", SOLVED)
def test_the_solution_of_each_task_is_right_and_the_agent_sees_neither_it_nor_the_tests(records, name):
    record = records[f"solved {name}"]
    assert score(record) == 1.0
    listed = outputs(record.calls[-1].request)[0]
    assert listed.split() == ["/logs/verifier:", "/tests:", f"{records['tasks']}:"], "the folders are empty for it"


@pytest.mark.slow
async def test_a_program_is_the_agent_and_its_time_is_that_of_the_task(tasks):
    copy_task(tasks, "waits", agent_s=1.5)
    (tasks / "waits" / "environment" / "seconds").write_text("60")
    program = """
import os, time
print(os.getcwd())
open("greeting.txt", "w").write("hello")
time.sleep(60 * os.path.exists("seconds"))
"""
    environment = build_block(command=[sys.executable, "-c", program])
    async with opened_here(tasks.parent, environment=environment) as (agent, items):
        records = [await play(agent, items, name) for name in ("hello", "waits")]
    assert [(score(record), record.item.output_obj) for record in records] == [(1.0, "/app"), (1.0, "")]


def test_what_a_command_did_wrong_is_told_to_the_policy(records):
    slow, long, failed = outputs(records["mistakes"].calls[-1].request)
    assert slow == "error: the command took more than 2 s"
    assert ("... (30000 characters)" in long, long.endswith("(exit code 3)"), len(long) < 11_000) == (True, True, True)
    assert failed == "cat: nothing: No such file or directory\n(exit code 1)"
    assert score(records["mistakes"]) == 0.0


def test_an_agent_whose_time_is_over_is_scored(records):
    assert (score(records["over"]), len(records["over"].calls)) == (1.0, 2)


@pytest.mark.parametrize("name", REWARDS)
def test_how_the_reward_is_read_and_that_unknown_is_never_0(records, name):
    record, expected = records[name], REWARDS[name][1]
    if isinstance(expected, float):
        assert score(record) == expected
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


@pytest.mark.slow
@pytest.mark.parametrize(("change", "message"), REFUSED)
async def test_what_cannot_be_played_is_refused_before_work_starts(tasks, change, message):
    if isinstance(change, str):
        copied = change.startswith("COPY")
        file = tasks / "hello" / ("environment/Dockerfile" if copied else "task.toml")
        file.write_text(f"{file.read_text() if copied else ''}{change}\n")
    environment = build_block(**(change if isinstance(change, dict) else {}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        async with loaded_source(tasks.parent, environment=environment) as (_, source):
            source.load()


@pytest.mark.slow
async def test_a_container_begins_with_the_images_files_and_sees_the_tests_at_the_end(tasks, monkeypatch):
    docker = tasks.parent / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tasks.parent}/calls\n[ "$3" != harbor-partial ]\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tasks.parent}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"build --tag harbor-partial .*tasks/partial/environment"):
        async with loaded_source(tasks.parent, environment=build_block(sandbox="container")) as (_, source):
            source.load()
    shutil.rmtree(tasks / "partial")
    for settings in ({}, {"command": ["sh"]}):
        (tasks.parent / "calls").unlink()
        environment = build_block(sandbox="container", **settings)
        async with opened_here(tasks.parent, environment=environment) as (agent, items):
            assert score(await play(agent, items, "two_turns")) == 1.0
        runs = [line for line in (tasks.parent / "calls").read_text().splitlines() if line.startswith("run ")]
        first, last = runs[0], runs[-1]
        home = f"{tempfile.gettempdir()}/reinforge-{os.getuid()}"
        assert first.endswith(f"debian:stable-slim cp -a /app/. {home}/workspace")
        assert ("workspace:/app" in first, "workspace:/app" in last) == (False, True)
        assert all(f"/reward-{n}:{place} " in last for n, place in enumerate(("/tests", "/logs/verifier")))
        assert "tasks" not in "".join(runs), "no folder of a task is mounted"
