"""Servers of OpenEnv's protocol: a stand-in that is started by the environment, dies, and allows one session."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.episodes import make_runner, run_items
from tests.generated import DOCS

SERVER = Path(__file__).with_name("openenv_server.py")


def start(schema="number", port="{port}"):
    return [sys.executable, str(SERVER), port, schema]


@asynccontextmanager
async def opened(folder, **settings):
    """Yields the workflow and the tasks of a configuration with nothing but the environment."""
    block = {"_type": "openenv", "size": 4, "num_workers": 1, "command": start(), **settings}
    (folder / "run.yml").write_text(yaml.safe_dump({"environment": block}))
    loaded = load_config(folder / "run.yml")
    assert loaded.config.eval.general.max_concurrency == block["num_workers"]
    async with ComponentBuilder(loaded) as builder:
        items = (await builder.get_dataset()).load()
        yield await builder.get_workflow(), items


async def play(folder, script, *, concurrency=1, **settings):
    async with opened(folder, **settings) as (agent, items):
        runner = make_runner(agent, ScriptedPolicy(script), timeout_s=60)
        return [record for item in items for record in await run_items(runner, [item])]


def rewards(record):
    return [mark.step_reward for mark in record.marks if mark.step_reward is not None]


async def test_each_seed_is_a_task_and_the_rewards_of_the_steps_are_summed(tmp_path):
    records = await play(tmp_path, lambda request: "2", seed=4)
    assert [record.outcome for record in records] == [Outcome.OK] * 4
    assert [rewards(record) for record in records].count([0.5, 0.5]) == 1
    request = records[0].calls[1].request.messages
    assert [message["content"] for message in request] == ["guess a number below 4", "2", "you said 2"]


REPLIES = [
    ("number", "3", "you said 3"),
    ("number", '{"guess": 3}', "you said 3"),
    ("words", "three", "you said three"),
    ("words", " 3 ", "you said 3"),
    ("words", '{"word": "3"}', "you said 3"),
    ("words", '{"guess": 3}', 'you said {"guess": 3}'),
    ("pair", '{"guess": 3, "why": "x"}', "you said 3"),
    ("pair", "3", "not a JSON object"),
    ("number", "three", "the server refuses the action: bad"),
]


@pytest.mark.parametrize(("schema", "reply", "expected"), REPLIES)
async def test_what_a_reply_is(tmp_path, schema, reply, expected):
    record = (await play(tmp_path, lambda request: reply, command=start(schema), reset={"below": 9}))[0]
    first = record.calls[0].request.messages[0]["content"]
    assert first.startswith("guess a number below 9")
    assert ("JSON object of this schema" in first) == (schema == "pair")
    if record.outcome is Outcome.OK:
        assert record.calls[1].request.messages[-1]["content"] == expected
    else:
        assert (record.outcome, expected in record.reason) == (Outcome.POLICY_ERROR, True)


async def test_what_is_shown_and_when_an_episode_is_over_can_be_set(tmp_path):
    record = (await play(tmp_path, lambda request: "1", show="<{text}> {left}", max_steps=1))[0]
    assert record.calls[0].request.messages[0]["content"] == "<guess a number below 4> []"
    assert len(record.calls) == 1


async def test_a_server_that_dies_or_fails_costs_its_episode_and_is_started_again(tmp_path):
    answers = iter(["13", "12", "1", "1", "1", "1"])
    records = await play(tmp_path, lambda request: next(answers))
    assert [record.outcome for record in records] == [Outcome.TOOL_ERROR] * 2 + [Outcome.OK] * 2
    assert "closed the connection" in records[0].reason
    assert "EXECUTION_ERROR: no 12" in records[1].reason


async def test_a_started_server_dies_with_the_run_and_one_that_runs_is_used(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with subprocess.Popen(start(port=port), cwd=tmp_path) as server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        async with opened(tmp_path, command=None, url=f"http://127.0.0.1:{port}") as (agent, items):
            [record] = await run_items(make_runner(agent, ScriptedPolicy(lambda request: "1"), timeout_s=60), items[:1])
            assert record.outcome is Outcome.OK
            assert find_servers(tmp_path) == [server.pid]
        async with opened(tmp_path):
            assert len(find_servers(tmp_path)) == 2
        deadline = time.monotonic() + 10
        while find_servers(tmp_path) != [server.pid]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def find_servers(folder):
    """Returns those of a folder: other tests have theirs."""
    running = [each for each in psutil.process_iter(["cmdline", "cwd"]) if each.info["cwd"] == str(folder)]
    found = [each for each in running if str(SERVER) in (each.info["cmdline"] or ())]
    return [each.pid for each in found if "supervisor.py" not in " ".join(each.info["cmdline"])]


async def test_an_image_is_run_with_a_port_and_removed_at_the_end(tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    server = f'exec {sys.executable} {SERVER} "$(echo "$7" | cut -d: -f2)" number'
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != run ] || {server}\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    record = (await play(tmp_path, lambda request: "1", command=None, image="game:1"))[0]
    assert record.outcome is Outcome.OK, record.reason
    deadline = time.monotonic() + 10
    while len(calls := (tmp_path / "calls").read_text().splitlines()) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    name = re.fullmatch(r"run --rm --init --name (\S+) --publish 127\.0\.0\.1:\d+:8000 game:1", calls[0])[1]
    assert calls[1] == f"rm --force {name}"


REFUSED = [
    ({"url": "http://127.0.0.1:9"}, "write one of `url`, `command` and `image`"),
    ({"command": None}, "write one of `url`, `command` and `image`"),
    ({"command": None, "url": "http://127.0.0.1:9"}, "no OpenEnv server replies at http://127.0.0.1:9"),
    ({"command": [sys.executable, "-c", "import sys; sys.exit(5)"]}, "it exited with code 5"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
async def test_a_server_that_is_not_there_is_refused_before_work_starts(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        await opened(tmp_path, **settings).__aenter__()


@pytest.mark.parametrize("page", ["openenv", "harbor"])
def test_the_lines_of_the_pages_are_valid(page):
    text = (DOCS / f"environments/{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert build_config(yaml.safe_load(block)).config.workflow.static_type
