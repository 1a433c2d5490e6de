"""Deployed agents: what they are sent, how their answers are read, and whose failure a failure is."""

import asyncio
import json
import socket

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from reinforge.config.dump import dump_config
from reinforge.config.loader import load_config
from reinforge.errors import ConfigError
from reinforge.rollout.models import openai_http
from reinforge.rollout.workflows.templates import fill_template, fill_text
from reinforge.types.request import ModelReply
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy
from tests.outside_agents import open_workflow, run_episodes


async def call_model(body, text, **more):
    """What a deployed agent does with what it gets."""
    headers = {"Authorization": f"Bearer {body['api_key']}"}
    message = {"model": body["model"], "messages": [{"role": "user", "content": text}], **more}
    url = f"{body['base_url']}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=message, headers=headers) as response:
        return (await response.json())["choices"][0]["message"]["content"]


@pytest.fixture
async def service():
    servers = []

    async def serve(handle):
        app = web.Application()
        app.router.add_route("*", "/run", handle)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("/run"))

    yield serve
    for server in servers:
        await server.close()


async def run(folder, url, inputs=("question",), script=lambda request: "yes", timeout_s=20.0, retries=0, **settings):
    async with open_workflow(folder, {"_type": "http", "url": url, **settings}) as workflow:
        return await run_episodes(workflow, script, inputs, timeout_s=timeout_s, retries=retries)


async def test_a_service_calls_the_model_of_its_episode(tmp_path, service):
    async def handle(request):
        body = await request.json()
        reply = await call_model(body, body["input"])
        return web.json_response({"steps": [1], "answer": {"text": reply}, "got": sorted(body)})

    url = await service(handle)
    tasks = [f"task {i}" for i in range(6)]
    script = lambda request: f"said {request.messages[-1]['content']}"  # noqa: E731
    records = await run(tmp_path, url, tasks, script, result_json_path="$.answer.text")
    assert [record.item.output_obj for record in records] == [f"said {task}" for task in tasks]
    assert [bytes(record.calls[0].reply.tokens.token_ids).decode() for record in records] == [
        f"said {task}" for task in tasks
    ]
    (whole,) = await run(tmp_path, url)
    assert whole.item.output_obj == {
        "steps": [1],
        "answer": {"text": "yes"},
        "got": ["api_key", "base_url", "example_id", "input", "is_training", "model", "seed"],
    }


async def test_body_headers_and_method(tmp_path, service, monkeypatch):
    monkeypatch.setenv("AGENT_TOKEN", "canary-token")
    seen = []

    async def handle(request):
        seen.append((request.method, await request.json(), dict(request.headers)))
        return web.Response(text="plain text")

    body = {"q": "{input}", "note": "is {is_training}, {{input}}, {input}", "openai": {"key": "{api_key}"}, "n": [1]}
    headers = {"Authorization": "Bearer ${AGENT_TOKEN}", "X-Base": "{base_url}"}
    url = await service(handle)
    (record,) = await run(tmp_path, url, [{"a": ["é"]}], body=body, headers=headers, method="PUT")
    ((method, sent, got),) = seen
    assert (method, record.item.output_obj) == ("PUT", "plain text")
    assert (sent["q"], sent["n"]) == ({"a": ["é"]}, [1])
    assert sent["note"] == 'is true, {input}, {"a": ["é"]}'
    assert sent["openai"]["key"].startswith("sk-episode-")
    assert (got["Authorization"], got["X-Base"][:17]) == ("Bearer canary-token", "http://127.0.0.1:")


PATHS = [
    ("$", {"a": 1}, {"a": 1}),
    ("$.a", {"a": None}, None),
    ("$.a[0].b", {"a": [{"b": "x"}]}, "x"),
    ("$.a[*].b", {"a": [{"b": "x"}, {"b": "y"}]}, ["x", "y"]),
    ("$.a[?@.b == 2].c", {"a": [{"b": 1, "c": "n"}, {"b": 2, "c": "y"}]}, ["y"]),
]


@pytest.mark.parametrize(("path", "answer", "output"), PATHS)
async def test_the_output_is_found_by_its_path(tmp_path, service, path, answer, output):
    async def handle(request):
        return web.json_response(answer)

    (record,) = await run(tmp_path, await service(handle), result_json_path=path)
    assert (record.outcome, record.item.output_obj) == (Outcome.OK, output)


FAILURES = [
    (lambda: web.json_response({"b": 1}), Outcome.TOOL_ERROR, "has nothing at $.a (result_json_path): '{\"b\": 1}'"),
    (lambda: web.Response(text="sorry"), Outcome.TOOL_ERROR, "is not JSON"),
    (lambda: web.json_response("a text"), Outcome.TOOL_ERROR, "has nothing at $.a"),
    (lambda: web.Response(text="bad input", status=422), Outcome.TOOL_ERROR, "/run: 422 bad input"),
    (lambda: web.Response(text="illegal move", status=409), Outcome.POLICY_ERROR, "/run: 409 illegal move"),
    (lambda: web.Response(text="down", status=503), Outcome.BACKEND_ERROR, "/run: 503 down"),
    (
        lambda: web.Response(status=302, headers={"Location": "http://h/"}),
        Outcome.TOOL_ERROR,
        "redirects are not followed",
    ),
]


@pytest.mark.parametrize(("answer", "outcome", "reason"), FAILURES, ids=range(len(FAILURES)))
async def test_failures_of_the_agent(tmp_path, service, answer, outcome, reason):
    async def handle(request):
        return answer()

    url = await service(handle)
    (record,) = await run(tmp_path, url, result_json_path="$.a", policy_error_statuses=[409])
    assert record.outcome is outcome
    assert reason in record.reason


async def test_an_agent_that_fails_after_its_calls_is_not_asked_again_in_the_same_episode(tmp_path, service):
    """A second request would run the agent twice in one episode; the episode is retried instead."""
    num_requests = 0

    async def handle(request):
        nonlocal num_requests
        num_requests += 1
        await call_model(await request.json(), "x")
        if num_requests == 1:
            raise web.HTTPInternalServerError(text="boom")
        return web.Response(text="good")

    (record,) = await run(tmp_path, await service(handle), retries=1)
    assert (record.outcome, record.attempt, num_requests, len(record.calls)) == (Outcome.OK, 1, 2, 1)


async def test_an_agent_that_fails_on_an_unusable_tool_call_met_a_failure_of_the_policy(tmp_path, service, monkeypatch):
    async def handle(request):
        body = await request.json()
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        await call_model(body, "x", tools=[tool])
        raise web.HTTPInternalServerError(text="no tool call")

    sample = ScriptedPolicy.sample

    async def sample_bad_call(self, request):
        reply = await sample(self, request)
        return ModelReply(reply.message, "stop", reply.tokens, failure="the tool call is not JSON")

    monkeypatch.setattr(ScriptedPolicy, "sample", sample_bad_call)
    (record,) = await run(tmp_path, await service(handle))
    assert record.outcome is Outcome.POLICY_ERROR
    assert "the tool call is not JSON; the agent then failed" in record.reason
    assert "500 no tool call" in record.reason


async def test_nobody_listens(tmp_path):
    with socket.socket() as taken:  # no other program can listen at its port meanwhile
        taken.bind(("127.0.0.1", 0))
        (record,) = await run(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}/run")
    assert record.outcome is Outcome.BACKEND_ERROR
    assert "Cannot connect to host" in record.reason


async def test_an_agent_that_hangs_costs_its_episode_alone(tmp_path, service):
    released = asyncio.Event()

    async def handle(request):
        if (await request.json())["input"] == "hang":
            await released.wait()
        return web.Response(text="done")

    records = await run(tmp_path, await service(handle), ["hang", "go"], timeout_s=3.0)
    released.set()
    assert [record.outcome for record in records] == [Outcome.TIMEOUT, Outcome.OK]


async def test_a_long_answer_is_refused(tmp_path, service, set_limit):
    async def handle(request):
        return web.Response(text="x" * 4096)

    set_limit("response_bytes", 1024)
    (record,) = await run(tmp_path, await service(handle))
    assert record.outcome is Outcome.BACKEND_ERROR
    assert "larger than" in record.reason


REFUSED = [
    ({"url": "nowhere"}, '"nowhere" is not a URL'),
    ({"url": "http://169.254.169.254/latest"}, "link-local address or a cloud's metadata service"),
    ({"url": "http://[::ffff:a9fe:a9fe]/"}, "link-local address or a cloud's metadata service"),
    ({"url": "http://me:secret@host/"}, "contains a user or password"),
    ({"url": "http://h/", "body": {"a": "{inputs}"}}, 'no placeholder {inputs}, did you mean "input"?'),
    ({"url": "http://h/", "headers": {"a": "{input}"}}, "there is no placeholder {input}"),
    ({"url": "http://h/", "result_json_path": "answer"}, '"answer" is not a JSONPath'),
    ({"url": "http://h/", "result_json_path": "$.a["}, '"$.a[" is not a JSONPath'),
    ({"url": "http://h/", "method": "GET"}, "'POST' or 'PUT'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=range(len(REFUSED)))
async def test_what_cannot_work_is_refused_before_work_starts(tmp_path, settings, message):
    with pytest.raises(ConfigError) as caught:
        async with open_workflow(tmp_path, {"_type": "http", **settings}, makes_models=False):
            pass
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/run.yml:")
    assert "secret@" not in str(caught.value)


async def test_a_name_that_resolves_to_a_blocked_address_is_refused(tmp_path, service, monkeypatch):
    seen = []

    async def handle(request):
        seen.append(request)
        return web.Response(text="secrets")

    async def resolve(self, host, port=0, family=0):
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": 2, "proto": 0, "flags": 0}]

    url = (await service(handle)).replace("127.0.0.1", "agent.example")
    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    (record,) = await run(tmp_path, url)
    assert (record.outcome, len(seen)) == (Outcome.OK, 1)
    monkeypatch.setattr(openai_http, "is_metadata_host", lambda host: host == "127.0.0.1")
    (record,) = await run(tmp_path, url)
    assert (record.outcome, len(seen)) == (Outcome.BACKEND_ERROR, 1)


async def test_the_place_of_the_episodes_key_is_no_secret(tmp_path, caplog):
    headers = {"Authorization": "Bearer {api_key}"}
    async with open_workflow(tmp_path, {"_type": "http", "url": "http://h/", "headers": headers}, makes_models=False):
        loaded = load_config(tmp_path / "run.yml")
    assert yaml.safe_load(dump_config(loaded))["workflow"]["body"]["api_key"] == "{api_key}"
    assert yaml.safe_load(dump_config(loaded))["workflow"]["headers"] == headers
    assert not caplog.records


def test_templates_do_not_fill_in_what_they_filled_in():
    values = {"input": "{seed}", "seed": 7}
    assert fill_template({"a": "{input}", "b": "x{input}{seed}", "c": json.loads("[true]")}, values) == {
        "a": "{seed}",
        "b": "x{seed}7",
        "c": [True],
    }
    assert fill_text("{seed}", values) == "7"
