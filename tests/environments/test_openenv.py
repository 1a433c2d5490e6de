"""Servers of OpenEnv's protocol: a stand-in that is started by the environment, dies, and allows one session."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, PolicyFailure
from reinforge.types.environment import Reply
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments.playing import loaded_source, opened, rewards
from tests.episodes import make_runner, run_items
from tests.generated import DOCS

SERVER = Path(__file__).with_name("openenv_server.py")


def build_block(**settings):
    return {
        "_type": "openenv",
        "size": 4,
        "num_workers": 1,
        "command": [sys.executable, str(SERVER), "{port}"],
    } | settings


async def play(agent, items, script):
    runner = make_runner(agent, ScriptedPolicy(script), concurrency=1, timeout_s=60)
    return [record for item in items for record in await run_items(runner, [item])]


async def test_each_seed_is_a_task_and_a_started_server_dies_with_the_run(tmp_path):
    async with opened(tmp_path, environment=build_block(seed=4)) as (agent, items):
        records = await play(agent, items, lambda request: "2")
        assert len(servers := find_servers(tmp_path)) == 1
    assert [record.outcome for record in records] == [Outcome.OK] * 4
    assert [rewards(record) for record in records].count([0.5, 0.5]) == 1, "the rewards of the steps"
    request = records[0].calls[1].request.messages
    assert [message["content"] for message in request] == ["guess a number below 4", "2", "you said 2"]
    assert (await asyncio.to_thread(psutil.wait_procs, servers, timeout=10))[1] == []


def find_servers(folder):
    """Returns those of a folder: other tests have theirs."""
    running = [each for each in psutil.process_iter(["cmdline", "cwd"]) if each.info["cwd"] == str(folder)]
    found = [each for each in running if str(SERVER) in (each.info["cmdline"] or ())]
    return [each for each in found if "supervisor.py" not in " ".join(each.info["cmdline"])]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that runs already."""
    command, folder = [sys.executable, str(SERVER), "0"], tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        yield re.search(r"http://[\d.:]+", server.stdout.readline())[0]
        server.kill()


async def step(folder, url, *replies, **settings):
    """Sends the replies of an episode; returns what the first task says, and the results."""
    environment = build_block(command=None, url=url, **settings)
    async with loaded_source(folder, environment=environment) as (_, source):
        episode, item = source.create(), source.load()[0]
        try:
            first = await episode.reset(item, 0)
            results = [await episode.step(Reply(reply)) for reply in replies]
        finally:
            await episode.close()
    assert find_servers(folder) == [], "one that runs is used"
    return first.messages[0]["content"], results


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


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "reply", "expected"), REPLIES)
async def test_what_a_reply_is(tmp_path, url, schema, reply, expected):
    playing = step(tmp_path, f"{url}/{schema}", reply, reset={"below": 9})
    if not expected.startswith("you said"):
        with pytest.raises(PolicyFailure, match=expected):
            await playing
        return
    first, [result] = await playing
    assert first.startswith("guess a number below 9")
    assert ("JSON object of this schema" in first) == (schema == "pair")
    assert result.observation.messages == [{"role": "user", "content": expected}]


async def test_what_is_shown_and_when_an_episode_is_over_can_be_set(tmp_path, url):
    first, [result] = await step(tmp_path, url, "1", show="<{text}> {left}", max_steps=1)
    assert (first, result.done) == ("<guess a number below 4> []", True)


@pytest.mark.slow
async def test_a_server_that_dies_or_fails_costs_its_episode_and_is_started_again(tmp_path):
    answers = iter(["13", "12", "1", "1", "1", "1"])
    async with opened(tmp_path, environment=build_block()) as (agent, items):
        records = await play(agent, items, lambda request: next(answers))
    assert [record.outcome for record in records] == [Outcome.TOOL_ERROR] * 2 + [Outcome.OK] * 2
    assert "closed the connection" in records[0].reason
    assert "EXECUTION_ERROR: no 12" in records[1].reason


def test_as_many_episodes_are_played_at_once_as_the_servers_allow():
    for own, count in (({}, 1), ({"sessions": 3, "num_workers": 2}, 6), ({"command": None, "url": "http://h"}, 1)):
        assert build_config({"environment": build_block(**own)}).config.eval.general.max_concurrency == count


@pytest.mark.slow
async def test_an_image_is_run_with_a_port_and_removed_at_the_end(tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    server = f'exec {sys.executable} {SERVER} "$(echo "$7" | cut -d: -f2)"'
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != run ] || {server}\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    async with opened(tmp_path, environment=build_block(command=None, image="game:1")) as (agent, items):
        [record] = await play(agent, items[:1], lambda request: "1")
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
        async with loaded_source(tmp_path, environment=build_block(**settings)) as (_, source):
            source.load()


@pytest.mark.parametrize("page", ["openenv", "harbor"])
def test_the_lines_of_the_pages_are_valid(page):
    text = (DOCS / f"environments/{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert build_config(yaml.safe_load(block)).config.workflow.static_type
