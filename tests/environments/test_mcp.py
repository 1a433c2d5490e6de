"""Programs play the environment of their episode by MCP: through a real gateway, with the MCP client of our agents."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.environments.mcp import VERSIONS
from reinforge.environments.session import bind_environment
from reinforge.errors import ConfigError
from reinforge.rollout.gateway import Gateway
from reinforge.rollout.workflow import bind_workflow
from reinforge.rollout.workflows.mcp_server import MCPServer, MCPServerConfig
from reinforge.rollout.workflows.presets import PRESETS
from reinforge.rollout.workflows.tools import ToolFailed
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.environments.games import Dice
from tests.environments.playing import LocalBuilder, LocalHost, opened, report, rewards
from tests.episodes import make_runner, run_items
from tests.gateway import ask
from tests.journal_rows import read_rows

GAMES = Path(__file__).with_name("games.py")
INITIALIZE = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
OVER = "The episode is over."
PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
PLAYER = re.search(r"^```python\n(# player.py\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
"""An agent that knows nothing but the standard library."""


async def play(agent, script=lambda request: "six", **dice):
    """Plays an agent's episodes with the environment in this process."""
    host = LocalHost(Dice(**dice))
    runner = make_runner(bind_environment(bind_workflow(agent), host), ScriptedPolicy(script), seed=0)
    return await run_items(runner, await host.load())


def make_local_builder(loaded):
    return LocalBuilder(loaded, Dice())


async def play_command(folder, make_builder=make_local_builder, **settings):
    environment = {"_type": "python", "source": "games:Dice", "arguments": {"count": 2}, "num_workers": 1}
    sections = {"environment": environment, "workflow": {"_type": "command", **settings}}
    async with opened(folder, make_builder, **sections) as (agent, items):
        return await run_items(make_runner(agent, ScriptedPolicy(lambda request: "six"), seed=0), items)


@asynccontextmanager
async def connected(context):
    """Yields the episode's environment as the MCP client of our agents sees it."""
    async with context.gateway() as access:
        headers = {"Authorization": f"Bearer {access.api_key}"}
        client = MCPServer(MCPServerConfig(url=access.environment_url, headers=headers), Path())
        await client.start()
        try:
            yield client
        finally:
            await client.close()


async def reply(llm, *texts):
    completion = await llm.chat.completions.create(messages=[{"role": "user", "content": text} for text in texts])
    return completion.choices[0].message.content


async def play_dice(item, llm, context):
    """Shows the model what the environment says, until it is over; returns all of it."""
    async with connected(context) as client:
        said = [await client.call("observe", {}, context)]
        while OVER not in said[-1]:
            said.append(await client.call("act", {"text": await reply(llm, *said)}, context))
        with pytest.raises(ToolFailed, match=OVER):
            await client.call("act", {"text": "six"}, context)
        return said


async def test_a_client_plays_and_the_rewards_are_those_of_the_environment():
    answers = iter(["six", "one", "six"])
    [record] = await play(play_dice, lambda request: next(answers))
    assert record.outcome is Outcome.OK
    task, *rolled = record.item.output_obj
    assert (task, len(rolled)) == ("q0: roll", 3)
    assert re.fullmatch(rf"rolled \[\d, \d, \d\]\n\n{re.escape(OVER)}", rolled[-1]), "and no reward is shown"
    assert rewards(record) == [1.0, 0.0, 1.0]
    assert (report(record)["reward"], report(record)["num_steps"]) == (2.0, 3.0)


async def test_tools_of_the_environment_are_those_of_the_server():
    async def agent(item, llm, context):
        async with connected(context) as client:
            said = [await client.call("roll", {}, context) for _ in range(3)]
            return [each.name for each in client.tools], said[-1]

    [record] = await play(agent, kinds=["tool"])
    names, last = record.item.output_obj
    assert names == ["roll", "act", "observe"]
    assert OVER in last
    assert report(record)["reward"] == 3.0


async def test_episodes_at_the_same_time_play_their_own_environments_with_their_own_keys():
    accesses, both = [], asyncio.Barrier(2)

    async def agent(item, llm, context):
        with gateway.attach(context.endpoint) as access:
            accesses.append(access)
            await both.wait()
            (other,) = [each for each in accesses if each is not access]
            (wrong, _), (_, mine) = await send(access, "ping", key=other.api_key), await send(access, *observe)
            _, alone = await send(access, *observe, path="/mcp")
            await both.wait()
        assert mine == alone
        return item.id, wrong, mine["result"]["content"][0]["text"], (await send(access, "ping"))[0]

    observe = ("tools/call", {"name": "observe"})
    async with Gateway() as gateway:
        records = await play(agent, count=2)
    outputs = [record.item.output_obj for record in records]
    assert outputs == [("plain-0", 401, "q0: roll", 410), ("plain-1", 401, "q1: roll", 410)]
    first, again = [await play(play_dice, count=2) for _ in range(2)]
    assert [each.item.output_obj for each in first] == [each.item.output_obj for each in again]
    assert first[0].item.output_obj != first[1].item.output_obj


async def send(access, method, params=None, *, body=None, verb="POST", path=None, key=None, **headers):
    """Sends one message; returns the status and the answer."""
    message = {"jsonrpc": "2.0", "id": 7, "method": method, **({} if params is None else {"params": params})}
    path = path or "/" + access.environment_url.split("/", 3)[3]
    headers |= {"authorization": f"Bearer {key or access.api_key}"}
    status, _, answer = await ask(access, body if body is not None else message, path=path, method=verb, **headers)
    return status, json.loads(answer) if answer else None


@asynccontextmanager
async def served():
    """Yields a function that sends a message to the environment of an episode."""
    answers, done = asyncio.Queue(), asyncio.Event()

    async def agent(item, llm, context):
        async with context.gateway() as access:
            await answers.put(access)
            await done.wait()

    playing = asyncio.create_task(play(agent))
    access = await answers.get()
    yield lambda *message, **more: send(access, *message, **more)
    done.set()
    await playing


BAD = [
    (b"{", 400, -32700, "not JSON"),
    (b'{"a": "\xff"}', 400, -32700, "not JSON"),
    (b"[" * 10_000, 400, -32700, "nested"),
    (b"[" + b"1," * 3_000_000 + b"1]", 413, -32700, "values"),
    ([{"jsonrpc": "2.0", "id": 1, "method": "ping"}], 400, -32600, "batches"),
    ({"id": 1, "method": "ping"}, 400, -32600, '"jsonrpc": "2.0"'),
    ({"jsonrpc": "2.0", "id": 1, "method": 1}, 400, -32600, "method"),
    ({"jsonrpc": "2.0", "id": None, "method": "ping"}, 400, -32600, "id"),
    ({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": [1]}, 400, -32602, "params"),
]
BAD_CALLS = [
    ("resources/list", {}, -32601, "resources/list"),
    ("initialize", {}, -32602, "protocolVersion"),
    ("tools/call", {}, -32602, "there are act, observe"),
    ("tools/call", {"name": "roll", "arguments": {}}, -32602, "there are act, observe"),
    ("tools/call", {"name": ["act"]}, -32602, "there are act, observe"),
    ("tools/call", {"name": "act", "arguments": [1]}, -32602, "arguments"),
    ("tools/call", {"name": "act", "arguments": {"text": 6}}, -32602, "text"),
    ("tools/call", {"name": "act"}, -32602, "text"),
]


async def test_bad_input_gets_the_error_codes_of_json_rpc_and_changes_nothing():
    async with served() as post:
        for body, status, code, reason in BAD:
            found, answer = await post("", body=body)
            assert (found, answer["id"], answer["error"]["code"]) == (status, None, code), (str(body)[:80], answer)
            assert reason in answer["error"]["message"]
        for method, params, code, reason in BAD_CALLS:
            found, answer = await post(method, params)
            assert (found, answer["id"], answer["error"]["code"]) == (200, 7, code), (method, params, answer)
            assert reason in answer["error"]["message"]
        _, answer = await post("tools/call", {"name": "observe"})
        assert answer["result"] == {"content": [{"type": "text", "text": "q0: roll"}], "isError": False}


async def test_the_handshake_of_each_version_of_the_protocol():
    async with served() as post:
        for asked, agreed in [*((each, each) for each in VERSIONS), ("2026-07-28", VERSIONS[0]), ("1", VERSIONS[0])]:
            status, answer = await post("initialize", {**INITIALIZE, "protocolVersion": asked})
            assert (status, answer["result"]["protocolVersion"]) == (200, agreed)
        assert answer["result"]["instructions"].endswith("q0: roll")
        assert answer["result"]["capabilities"] == {"tools": {}}
        assert await post("", body={"jsonrpc": "2.0", "method": "notifications/initialized"}) == (202, None)
        assert await post("", body={"jsonrpc": "2.0", "id": 1, "result": {}}) == (202, None)
        assert (await post("ping"))[1] == {"jsonrpc": "2.0", "id": 7, "result": {}}
        status, answer = await post("ping", mcp_protocol_version="2026-07-28")
        assert (status, answer["error"]["code"]) == (400, -32600)
        assert (await post("ping", verb="GET"))[0] == 405
        assert (await post("ping", verb="DELETE"))[0] == 405


@pytest.mark.parametrize(
    ("kind", "dies", "outcome", "reason", "told"),
    [
        ("raises", True, Outcome.TOOL_ERROR, "the board broke", f"The environment failed. {OVER}"),
        ("raises", False, Outcome.TOOL_ERROR, "the board broke", f"The environment failed. {OVER}"),
        ("fails_at_reset", False, Outcome.TOOL_ERROR, "no board", f"The environment failed. {OVER}"),
        ("nan", False, Outcome.TOOL_ERROR, "reward nan", f"The environment failed. {OVER}"),
        ("illegal", True, Outcome.POLICY_ERROR, "illegal move", f"illegal move. {OVER}"),
        ("illegal", False, Outcome.POLICY_ERROR, "illegal move", f"illegal move. {OVER}"),
    ],
)
async def test_a_failure_of_the_environment_is_that_of_the_episode_whatever_the_program_does(
    kind, dies, outcome, reason, told
):
    said = []

    async def agent(item, llm, context):
        async with context.gateway() as access:
            await reply(llm, "go")
            for _ in range(2):
                _, answer = await send(access, "tools/call", {"name": "act", "arguments": {"text": "six"}})
                said.append(answer["error"]["message"] if "error" in answer else answer["result"]["content"][0]["text"])
        if dies:
            raise OSError("a tool failed")
        return "fine"

    [record] = await play(agent, kinds=[kind])
    assert (record.outcome, said) == (outcome, [told, told])
    assert (reason in record.reason, report(record)) == (True, None)


async def test_a_program_that_does_not_wait_for_the_environment_has_no_reward():
    async def agent(item, llm, context):
        async with context.gateway() as access:
            await reply(llm, "go")
            call = asyncio.create_task(send(access, "tools/call", {"name": "act", "arguments": {"text": "six"}}))
            while not context.environment.num_steps:
                await asyncio.sleep(0.001)
            assert not call.done()
            call.cancel()

    [record] = await play(agent, kinds=["waits"])
    assert record.outcome is Outcome.TOOL_ERROR
    assert "before the environment had answered" in record.reason


async def test_a_program_that_stops_before_the_first_reward_has_failed_by_its_policy():
    async def agent(item, llm, context):
        async with connected(context):
            return await reply(llm, "go")

    [record] = await play(agent)
    assert (record.outcome, record.reason) == (
        Outcome.POLICY_ERROR, "the agent stopped before the environment's episode was over",
    )  # fmt: skip


async def test_a_plain_agent_starts_a_program_that_plays(tmp_path):
    """In a thread of the run, by `with context.gateway()`."""
    (tmp_path / "player.py").write_text(PLAYER)

    def agent(item, llm, context):
        with context.gateway() as access:
            command = [sys.executable, str(tmp_path / "player.py")]
            env = {**os.environ, **access.environment(), "REINFORGE_MODEL": "agent"}
            return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    [record] = await play(agent)
    assert (record.outcome, report(record)["reward"]) == (Outcome.OK, 3.0)


@pytest.mark.slow
async def test_a_command_plays(tmp_path):
    (tmp_path / "player.py").write_text(PLAYER)
    shutil.copy(GAMES, tmp_path / "games.py")
    records = await play_command(tmp_path, ComponentBuilder, command=[sys.executable, "player.py"])
    assert [record.outcome for record in records] == [Outcome.OK] * 2
    assert all(record.item.output_obj.endswith(OVER) for record in records)
    assert [report(record)["reward"] for record in records] == [3.0, 3.0]


def test_the_files_of_the_page_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "player.py").write_text(PLAYER)
    section = PAGE.partition("## A program or a coding agent")[2]
    files = re.findall(r"^```yaml\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    workflows = []
    for number, text in enumerate(files):
        (tmp_path / f"{number}.yml").write_text(text)
        config = load_config(tmp_path / f"{number}.yml").config
        assert config.environment.name == "TicTacToe-v0"
        workflows.append((config.workflow.static_type, config.workflow.preset))
    assert workflows == [("command", None), ("command", "claude_code")]


async def test_a_command_whose_workspace_is_scored_gets_no_environment(tmp_path):
    settings = {"command": ["env"], "workspace": {}, "reward": {"command": ["true"]}}
    [record] = await play_command(tmp_path, **settings)
    assert "OPENAI_BASE_URL=" in record.item.output_obj
    assert "REINFORGE_ENVIRONMENT_URL" not in record.item.output_obj
    assert report(record)["reward"] == 1.0


SERVERS = {
    "claude_code": (["--mcp-config", "{home}/mcp.json"], "mcp.json", ["mcpServers"], {"type": "http"}),
    "gemini_cli": ([], ".gemini/settings.json", ["mcpServers"], {"trust": True}),
    "opencode": ([], ".config/opencode/opencode.json", ["mcp"], {"type": "remote", "oauth": False}),
    "qwen_code": ([], ".qwen/settings.json", ["mcpServers"], {"trust": True}),
    "codex": (['mcp_servers.environment.url="{url}"'], None, [], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
async def test_a_coding_agent_finds_the_environment_in_its_own_configuration(tmp_path, monkeypatch, preset):
    program = tmp_path / PRESETS[preset]["command"][0]
    program.write_text(f"#!{sys.executable}\n" + STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if preset not in SERVERS:
        with pytest.raises(ConfigError, match=f"{preset} has no MCP client, so it cannot play the `environment`"):
            await play_command(tmp_path, preset=preset)
        return
    [record] = await play_command(tmp_path, preset=preset)
    found = json.loads(record.item.output_obj)
    arguments, file, path, expected = SERVERS[preset]
    url = found["env"]["REINFORGE_ENVIRONMENT_URL"]
    values = {"{home}": found["env"]["HOME"], "{url}": url}
    for argument in arguments:
        filled = re.sub(r"\{\w+\}", lambda match: values[match[0]], argument)
        assert filled in found["arguments"]
    task = found["stdin"] + " ".join(found["arguments"])
    assert "q0" in task
    assert "MCP server `environment`" in task
    if file is not None:
        server = json.loads(found["files"][file])
        for key in [*path, "environment"]:
            server = server[key]
        assert expected.items() <= server.items()
        key = found["env"]["OPENAI_API_KEY"]
        given = server.get("url", server.get("httpUrl"))
        assert given == url or given == f"{url}?key={key}"
        assert given != url or server["headers"] == {"Authorization": f"Bearer {key}"}
        assert found["status"] == 200, "its URL and headers reach the environment"


STAND_IN = """
import json, os, sys, urllib.request
from pathlib import Path

home = Path(os.environ["HOME"])
files = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
found = {"arguments": sys.argv[1:], "env": dict(os.environ), "files": files, "stdin": sys.stdin.read()}
servers = [json.loads(text).get(key) for text in files.values() if text[0] == "{" for key in ("mcp", "mcpServers")]
for server in [each["environment"] for each in servers if each]:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"}).encode()
    url, headers = server.get("url") or server["httpUrl"], server.get("headers", {})
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as response:
        found["status"] = response.status
print(json.dumps(found))
"""


async def test_a_configuration_file_of_the_user_keeps_its_own_servers(tmp_path, monkeypatch):
    (tmp_path / "qwen").write_text(f"#!{sys.executable}\n" + STAND_IN)
    (tmp_path / "qwen").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    own = {"mcpServers": {"mine": {"command": "x"}}, "theme": "dark"}
    home_files = {".qwen/settings.json": json.dumps(own)}
    [record] = await play_command(tmp_path, preset="qwen_code", home_files=home_files)
    written = json.loads(json.loads(record.item.output_obj)["files"][".qwen/settings.json"])
    assert (written["theme"], sorted(written["mcpServers"])) == ("dark", ["environment", "mine"])
    with pytest.raises(ConfigError, match="not a JSON object of objects"):
        await play_command(tmp_path, preset="qwen_code", home_files={".qwen/settings.json": "// mine"})


LETTERS = """
from reinforge import Environment, EnvironmentSource, Observation, StepResult
from reinforge.types.evaluation import EvalInputItem


class Letters(EnvironmentSource):
    def load(self):
        return [EvalInputItem.from_row({"id": str(number), "question": f"word {number}"}) for number in range(64)]

    def create(self):
        return Word()


class Word(Environment):
    async def reset(self, item, seed):
        self.turns = 0
        return Observation([{"role": "user", "content": f"{item.input_obj}: vowels"}])

    async def step(self, reply):
        self.turns += 1
        said = Observation([{"role": "user", "content": "more"}])
        return StepResult(said, sum(letter in "aeiou" for letter in reply.text) / 8, done=self.turns == 2)
"""


@pytest.mark.slow
def test_a_program_that_plays_is_trained_on_the_rewards_of_the_environment(project):
    project.write("letters.py", LETTERS)
    project.write("player.py", PLAYER)
    del project.settings["eval"], project.settings["finetuning"]["reward_function"]
    project.set("environment", "python:letters:Letters")
    project.set("workflow", {"_type": "command", "command": [sys.executable, "player.py"]})
    project.set("finetuning.limits.episode_timeout_s", 60)
    project.finetune("--smoke", code=0)
    folder = project.folder / "runs" / "r-smoke"
    summary = json.loads((folder / "summary.json").read_text())
    assert [version["num_updates"] for version in summary["policy_versions"]] == [0, 1]
    assert set(summary["episodes"]) == {"ok"}
    assert summary["tokens"]["trained"] > 0
    rewards = set()
    for (data,) in read_rows(folder, "SELECT data FROM episodes"):
        episode = json.loads(data)
        replies = [call["reply"]["content"] for call in episode["calls"]]
        assert len(replies) == 2
        assert episode["reward"] == sum(letter in "aeiou" for reply in replies for letter in reply) / 8
        rewards.add(episode["reward"])
    assert len(rewards) > 1
