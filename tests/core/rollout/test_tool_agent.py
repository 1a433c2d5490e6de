"""The plain loop with tools: Python functions and MCP servers, and whose failure a failure is."""

import asyncio
import contextlib
import json
import re
import signal
import sys
import textwrap
import time

import psutil
import pytest

from reinforge.errors import BackendUnavailable, ConfigError
from reinforge.limits import Limits
from reinforge.rollout.workflows.mcp_server import build_http_client, read_end
from reinforge.rollout.workflows.tools import build_python_tool, parse_docstring
from reinforge.trainer.options import LiveRun, RunOptions
from reinforge.trainer.shutdown import TICK_S, ShutdownThread, run_interruptible
from reinforge.types.request import ModelReply
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy, examples
from tests.outside_agents import find_processes_in, open_workflow, run_episodes

TOOLS = """
import asyncio, os, sys, time
from reinforge import PolicyFailure
from reinforge.rollout.context import EpisodeContext
from reinforge.types.evaluation import EvalInputItem

def add(a: int, b: int = 1) -> int:
    '''Adds two numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return a + b

async def look(item: EvalInputItem, context: EpisodeContext, word: str) -> dict:
    '''Looks up a word.'''
    await asyncio.sleep(0)
    return {"word": word, "input": item.input_obj, "seed": context.seed, "scope": context.functions}

def fail(kind: str) -> str:
    if kind == "policy":
        raise PolicyFailure("illegal move")
    if kind == "exit":
        sys.exit(3)
    if kind == "long":
        return "x" * 200_000
    if kind == "surrogate":
        return "\\ud800"
    return 1 / 0

async def block(seconds: float) -> str:
    time.sleep(seconds)
    return "blocked"

def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"

async def exit_here() -> str:
    sys.exit(3)

def no_schema(*words): ...
"""


def call(name, _id="c1", **arguments):
    return {"id": _id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


class CallingPolicy(ScriptedPolicy):
    def __init__(self, *replies):
        super().__init__()
        self.replies = replies

    async def sample(self, request):
        turn = sum(message["role"] == "assistant" for message in request.messages)
        wanted = self.replies[turn]
        calls = wanted if isinstance(wanted, list) else None
        self.script = lambda _: json.dumps(calls) if calls else wanted
        reply = await super().sample(request)
        message = {"role": "assistant", "content": None if calls else wanted}
        if calls:
            message["tool_calls"] = calls
        return ModelReply(message, "tool_calls" if calls else "stop", reply.tokens, 1, 1)


@pytest.fixture
def loop(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_tools", None)

    async def run(*replies, inputs=("question",), timeout_s=30.0, retries=0, policy=None, **settings):
        settings = {"_type": "tool_agent", "tools": ["my_tools:add", "my_tools:look", "my_tools:fail"], **settings}
        async with open_workflow(tmp_path, settings) as workflow:
            return await run_episodes(
                workflow, policy=policy or CallingPolicy(*replies), inputs=inputs, timeout_s=timeout_s, retries=retries
            )

    yield run
    sys.modules.pop("my_tools", None)


async def test_the_policy_calls_tools_and_answers(loop):
    replies = [call("add", a=2), call("look", "c2", word="x")], "3"
    (record,) = await loop(*replies, system="Be brief.", prompt="Q: {input} ({id})", max_tokens=9)
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, "3")
    first, last = (each.request for each in record.calls)
    assert first.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: question (0)"},
    ]
    assert first.sampling.max_tokens == 9
    results = {message["tool_call_id"]: message["content"] for message in last.messages[3:]}
    assert results["c1"] == "3"
    assert json.loads(results["c2"]) == {"word": "x", "input": "question", "seed": record.seed, "scope": ["look"]}
    assert [tool["function"]["name"] for tool in first.tools] == ["add", "look", "fail"]
    assert first.tools[0]["function"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first."},
                "b": {"type": "integer", "description": "The second.", "default": 1},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    assert first.tools[1]["function"]["parameters"]["properties"] == {"word": {"type": "string"}}


RESULTS = [
    (call("gone"), "Error: there is no tool 'gone'; there are add, look, fail"),
    (call("add", a="two"), "Error: wrong arguments: a: Input should be a valid integer, unable to parse"),
    (call("add", c=1), "Error: wrong arguments: a: Field required; c: Extra inputs are not permitted"),
    (call("fail", kind="bug"), "Error: ZeroDivisionError: division by zero"),
    (call("fail", kind="exit"), "Error: RuntimeError: SystemExit(3)"),
    (call("fail", kind="surrogate"), "?"),
]


@pytest.mark.parametrize(("tool_call", "result"), RESULTS)
async def test_errors_of_tools_are_results(loop, tool_call, result):
    (record,) = await loop([tool_call], "sorry")
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, "sorry")
    assert record.calls[1].request.messages[-1]["content"].startswith(result)


async def test_long_results_are_cut(loop):
    (record,) = await loop([call("fail", kind="long")], "ok")
    content = record.calls[1].request.messages[-1]["content"]
    assert content.endswith("x\n[cut after 100000 of 200000 characters]")
    assert len(content) < Limits().tool_result_chars + 100


@pytest.mark.parametrize(
    ("replies", "settings", "reason"),
    [
        (([call("fail", kind="policy")],), {}, "illegal move"),
        (([call("add", a=1)], [call("add", a=1)]), {"max_turns": 2}, "no answer after 2 replies (max_turns)"),
        (("no json",), {"answer": "json"}, "the answer is not JSON"),
        (
            ([{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{a"}}],),
            {},
            "the arguments of a call of add are not JSON",
        ),
        (
            ([{"id": "c", "type": "function", "function": {"name": "add", "arguments": "[1]"}}],),
            {},
            "the arguments of a call of add are not a JSON object",
        ),
    ],
)
async def test_failures_of_the_policy(loop, replies, settings, reason):
    (record,) = await loop(*replies, **settings)
    assert record.outcome is Outcome.POLICY_ERROR
    assert reason in record.reason


async def test_an_answer_in_json(loop):
    (record,) = await loop('{"a": 1}', answer="json", tools=[])
    assert record.item.output_obj == {"a": 1}
    assert record.calls[0].request.tools is None


class FirstCalls(CallingPolicy):
    """Calls the tool in the episode whose input is `bad`; answers at once in the others."""

    async def sample(self, request):
        if "bad" not in str(request.messages[0]["content"]):
            return await CallingPolicy("good").sample(request)
        return await super().sample(request)


@pytest.mark.parametrize(
    ("tool_call", "outcome", "reason"),
    [
        (call("block", seconds=60), Outcome.TIMEOUT, "blocked the event loop"),
        (call("sleep", seconds=60), Outcome.TIMEOUT, "not finished after 1 s"),
        (call("exit_here"), Outcome.TOOL_ERROR, "SystemExit"),
    ],
    ids=["block", "thread", "exit"],
)
async def test_a_tool_that_blocks_or_ends_costs_its_episode_alone(loop, tool_call, outcome, reason):
    tools = ["my_tools:exit_here", "my_tools:block", "my_tools:sleep"]
    guard = ShutdownThread(asyncio.get_running_loop(), asyncio.current_task(), LiveRun(blocked_s=1.0))
    with guard:
        good, bad = await loop(policy=FirstCalls([tool_call], "x"), tools=tools, inputs=["good", "bad"], timeout_s=1.0)
    assert (good.outcome, good.item.output_obj) == (Outcome.OK, "good")
    assert bad.outcome is outcome
    assert reason in bad.reason


async def test_the_loop_that_runs_on_after_a_run_has_its_own_signal_handlers_again():
    before = signal.getsignal(signal.SIGINT)
    with ShutdownThread(asyncio.get_running_loop(), asyncio.current_task(), LiveRun()):
        await asyncio.sleep(0)  # its first look at the loop
        assert signal.getsignal(signal.SIGINT) is not before
    await asyncio.sleep(2 * TICK_S)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_that_another_thread_closes_sets_no_signal_handlers(caplog):
    async def linger():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def work():
        asyncio.get_running_loop().lingering = asyncio.create_task(linger())
        await asyncio.sleep(2 * TICK_S)

    run_interruptible(work(), RunOptions())
    assert not [record for record in caplog.records if record.exc_info]


async def test_fields_that_a_row_lacks_are_told_before_work_starts(loop, tmp_path):
    settings = {"_type": "tool_agent", "prompt": "{question} {{literal}} {inptu} { json }"}
    async with open_workflow(tmp_path, settings, makes_models=False) as workflow:
        problems = workflow.example_problems(examples(2))
    assert [problem.message for problem in problems] == [
        f"the example {i} has no field for {{{name}}}{hint}"
        for i in (0, 1)
        for name, hint in (("question", ""), ("inptu", ', did you mean "input"?'))
    ]


REFUSED = [
    ({"tools": ["my_tools:gone"]}, 'my_tools has no "gone"'),
    ({"tools": ["os:system"]}, '"os:system" is not allowed'),
    ({"tools": ["my_tools:no_schema"]}, "no_schema has the parameter *words"),
    ({"tools": ["my_tools:add", "my_tools:add"]}, "two tools are named add"),
    ({"tools": [{"mcp": {}}]}, "set either command"),
    ({"tools": [{"mpc": {"url": "http://h/"}}]}, 'unknown key "mpc", did you mean "mcp"?'),
    ({"tools": [3]}, "expected a mapping of keys to values, found 3"),
    ({"tools": [{}]}, "expected `module:function`, or `mcp:` with a server"),
    ({"tools": [{"mcp": {"command": ["gone-server"]}}]}, 'there is no program "gone-server" in PATH'),
    ({"tools": [{"mcp": {"url": "http://169.254.169.254/mcp"}}]}, "link-local address"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.usefixtures("loop")
async def test_what_cannot_work_is_refused_before_work_starts(tmp_path, settings, message):
    with pytest.raises(ConfigError) as caught:
        async with open_workflow(tmp_path, {"_type": "tool_agent", **settings}, makes_models=False):
            pass
    assert message in str(caught.value)
    assert re.match(rf"{tmp_path}/run.yml:\d:\d workflow.tools", str(caught.value))


def test_docstrings():
    text = (
        "First.\n\nMore.\n\nArgs:\n    a: One\n        and more.\n    b (int): Two: three.\n\nReturns:\n    c: Nothing."
    )
    assert parse_docstring(text) == ("First.\n\nMore.", {"a": "One and more.", "b": "Two: three."})


def test_names_of_parameters_may_be_those_of_pydantic():
    def tool(schema: str, copy: list[int], _x: bool = False): ...

    parameters = build_python_tool(tool).definition["function"]["parameters"]
    assert parameters["properties"] == {
        "schema": {"type": "string"},
        "copy": {"type": "array", "items": {"type": "integer"}},
        "_x": {"type": "boolean", "default": False},
    }


@pytest.mark.usefixtures("loop")
async def test_without_the_sdk_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    settings = {"_type": "tool_agent", "tools": [{"mcp": {"url": "http://127.0.0.1:1/mcp"}}]}
    with pytest.raises(ConfigError, match=r'MCP SDK is not installed\n    fix: pip install "reinforge\[mcp\]"'):
        async with open_workflow(tmp_path, settings, makes_models=False):
            pass


SDK_SERVER = """
import os, sys
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def note(text: str) -> str:
    '''Takes a note.'''
    return text

@server.tool()
def fail(how: str) -> str:
    '''Fails.'''
    raise ValueError("a bug of the tool")

@server.tool()
def show() -> str:
    '''Shows the process.'''
    return f"{os.getpid()} {sorted(name for name in os.environ if 'CANARY' in name)}"

server.run("stdio")
"""

SERVER = """
import json, os, sys, time

notes = []

def note(text):
    notes.append(text)
    return ", ".join(notes)

def fail(how):
    if how == "die":
        os._exit(5)
    if how == "hang":
        time.sleep(300)
    raise ValueError("a bug of the tool")

TOOLS = {"note": note, "fail": fail, "show": None}

def answer(method, params):
    if method == "initialize":
        about = {"serverInfo": {"name": "test", "version": "1"}, "capabilities": {"tools": {}}}
        return {"protocolVersion": params["protocolVersion"], **about}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
    if method == "tools/call":
        try:
            return {"content": [{"type": "text", "text": TOOLS[params["name"]](**params["arguments"])}]}
        except Exception as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    return {} if method == "ping" else None

print("the server starts", file=sys.stderr)
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params"))
        failed = {"error": {"code": -32601, "message": "no such method"}}
        reply = failed if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}), flush=True)
"""
"""The same without the SDK, which takes a second to import."""


@pytest.fixture
def served(loop, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)

    async def run(*replies, server=(), **settings):
        mcp = {"command": [sys.executable, "server.py"], **dict(server)}
        return await loop(*replies, tools=["my_tools:add", {"mcp": mcp}], **settings)

    return run


def find_results(record):
    return [m["content"] for m in record.calls[-1].request.messages if m["role"] == "tool"]


@pytest.mark.slow
async def test_tools_of_an_mcp_server(served, tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text(SDK_SERVER)
    monkeypatch.setenv("CANARY_SECRET", "x")
    calls = [call("note", text="one"), call("add", "c2", a=1), call("show", "c3"), call("fail", "c4", how="")]
    replies = [*calls, call("note", "c5")], "done"
    (record,) = await served(*replies, server={"env": {"CANARY_NAMED": "1"}})
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, "done"), record.reason
    one, added, shown, failed, wrong = find_results(record)
    assert (one, added, failed) == ("one", "2", "Error: Error executing tool fail")
    assert wrong.startswith("Error:"), "errors of a server's tools are results"
    pid, _, names = shown.partition(" ")
    assert names == "['CANARY_NAMED']", "a clean environment"
    assert not psutil.pid_exists(int(pid)), "it ends with the run"
    names = [tool["function"]["name"] for tool in record.calls[0].request.tools]
    assert names == ["add", "note", "fail", "show"]
    assert record.calls[0].request.tools[1]["function"]["parameters"]["required"] == ["text"]


async def test_a_server_of_the_run_is_shared_and_one_of_an_episode_is_not(served):
    replies = [call("note", text="one")], "done"
    records = await served(*replies, inputs=["a", "b"])
    assert sorted(find_results(record)[0] for record in records) == ["one", "one, one"]
    records = await served(*replies, inputs=["a", "b"], server={"per_episode": True})
    assert [find_results(record)[0] for record in records] == ["one", "one"]


async def test_only_the_tools_that_are_named_are_offered(served):
    replies = [call("fail", how="raise")], "done"
    (record,) = await served(*replies, server={"tools": ["fail", "note"]})
    assert find_results(record) == ["Error: a bug of the tool"]
    assert len(record.calls[0].request.tools) == 3


@pytest.mark.parametrize("per_episode", [False, True])
async def test_a_server_that_dies_costs_its_episode_and_is_started_again(served, per_episode):
    (record,) = await served([call("fail", how="die")], "x", server={"per_episode": per_episode}, retries=1)
    assert (record.outcome, record.attempt) == (Outcome.BACKEND_ERROR, 1), "the second attempt met a new server"
    assert "MCP server" in record.reason
    assert "the server starts" in record.reason, "what it wrote"


@pytest.mark.parametrize("per_episode", [False, True])
async def test_a_server_that_hangs_costs_its_episode_and_is_started_again(served, tmp_path, caplog, per_episode):
    started, server = time.monotonic(), {"per_episode": per_episode}
    (record,) = await served([call("fail", how="hang")], "x", server=server, timeout_s=3.0, retries=1)
    assert (record.outcome, record.attempt) == (Outcome.TIMEOUT, 1)
    assert "has not answered a call of fail:\nthe server starts" in record.reason
    assert ("hangs, so it is started again" in caplog.text) is not per_episode
    assert time.monotonic() - started < 60
    assert find_processes_in(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "server", "message"),
    [
        ("import sys; sys.exit('no license')", {}, "no license"),
        (SERVER, {"tools": ["other"]}, 'it has no tool "other"; it has note, fail, show'),
    ],
)
async def test_a_server_that_does_not_start_ends_the_run_before_work(served, tmp_path, code, server, message):
    (tmp_path / "server.py").write_text(textwrap.dedent(code))
    with pytest.raises(BackendUnavailable) as caught:
        await served("x", server=server)
    assert "cannot be used" in str(caught.value)
    assert message in str(caught.value)


async def test_tools_with_the_same_name_are_refused(served, tmp_path):
    (tmp_path / "server.py").write_text(SERVER.replace('"note": note', '"add": note'))
    with pytest.raises(ConfigError, match="two tools are named add"):
        await served("x")


HTTP_SERVER = SDK_SERVER.replace('server.run("stdio")', 'server.run("streamable-http", port=0)')


@pytest.mark.slow
async def test_a_server_behind_a_url(loop, tmp_path):
    (tmp_path / "server.py").write_text(HTTP_SERVER)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "server.py"), stderr=asyncio.subprocess.PIPE
    )
    try:
        while (found := re.search(rb"http://127.0.0.1:\d+", line := await process.stderr.readline())) is None:
            assert line, "the server has exited"
        url = f"{found[0].decode()}/mcp"
        (record,) = await loop([call("note", text="by http")], "done", tools=[{"mcp": {"url": url}}])
    finally:
        process.kill()
        await process.wait()
    assert find_results(record) == ["by http"], record.reason


async def test_a_tool_behind_a_url_may_take_as_long_as_its_episode():
    async with build_http_client({"x-key": "1"}) as client:
        assert (client.timeout.connect, client.timeout.read, client.headers["x-key"]) == (30.0, None, "1")


def test_of_what_a_server_wrote_only_the_end_is_read(tmp_path, set_limit):
    set_limit("error_bytes", 8)
    with open(tmp_path / "errors", "w+") as errors:
        errors.write("a long line\nthe end")
        errors.flush()
        assert read_end(errors) == "\nthe end"
