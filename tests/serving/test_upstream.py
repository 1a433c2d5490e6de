"""A server before a large model: what passes, unchanged, and what is recorded of it."""

import asyncio
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import httpx
import pytest

from reinforge.errors import ConfigError
from reinforge.serving.answers import CHAT, CutAnswerError, read_answer
from reinforge.serving.recording import read_record_config
from reinforge.traces.importer import ImportOptions, import_traces
from tests.doubles import ScriptedPolicy
from tests.serving.large_model import LargeModel, pass_on, read_records
from tests.serving.serving import async_anthropic, async_openai, http, says, serve, wait_for
from tests.serving.test_tools import TEXT, TOOL, Pieces

KEY = "sk-upstream-0123456789abcdef"
USER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
async def large():
    async with LargeModel() as running:
        yield running


def ask(text, **more):
    return {"model": "large", "messages": says(text), **more}


async def post(app, text, headers=USER, **more):
    async with http(app, headers=headers) as client:
        return await client.post("/v1/chat/completions", json=ask(text, **more))


async def written(recorder, count):
    await wait_for(lambda: sum(recorder.counts.values()) >= count)


def rows_of(folder, tmp_path):
    """Returns what `reinforge data import` makes of the records."""
    report = import_traces([folder], tmp_path / "rows.jsonl", ImportOptions())
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()], report


async def read_raw(url, body, headers=USER):
    """Returns status, headers and undecoded bytes of an answer."""
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.post(f"{url}/chat/completions", json=body, headers=headers) as response,
    ):
        return response.status, response.headers, await response.read()


async def test_answers_pass_byte_for_byte_with_status_and_headers(large):
    async with pass_on(large.url) as (app, _):
        for body in (ask("hi"), ask("hi", stream=True), ask("busy"), ask("broken"), ask("wrong"), ask("long")):
            direct, passed = await read_raw(large.url, body), await read_raw(f"{app.address}/v1", body)
            assert passed[0] == direct[0]
            assert passed[2] == direct[2]
            kept = {name: value for name, value in direct[1].items() if name.lower() not in ("date", "server")}
            assert {name: value for name, value in passed[1].items() if name in kept}.items() >= kept.items()
            first, second = large.requests[-2:]
            assert (first[3], first[1]) == (second[3], "/api/v1/chat/completions")
            assert second[2]["authorization"] == USER["authorization"]


async def test_any_path_method_and_query_passes(large):
    async with pass_on(large.url) as (app, _), http(app) as client:
        put = await client.put("/v1/files/a%2Fb?x=1&y=%20", content=b"\xff\x00", headers={"x-own": "1"})
        await client.get("/v1/models")
        assert (await client.get("/v1/../secret")).status_code == 404
        assert (await client.get("/other")).status_code == 404
    assert (put.status_code, put.content, put.headers["content-type"]) == (201, b"\x00bytes\xff\x00", "image/png")
    assert [each[:2] for each in large.requests] == [
        ("PUT", "/api/v1/files/a%2Fb?x=1&y=%20"),
        ("GET", "/api/v1/models"),
    ]
    assert large.requests[0][2]["x-own"] == "1"


async def test_a_url_without_a_path_gets_the_path_of_the_client(large):
    async with pass_on(large.url.removesuffix("/api/v1")) as (app, _), http(app) as client:
        await client.post("/v1/messages", json={})
    assert large.requests[0][1] == "/v1/messages"


async def test_pieces_of_a_stream_pass_as_they_come(large):
    body = ask("never", stream=True)
    async with pass_on(large.url) as (app, _), aiohttp.ClientSession() as session:
        async with session.post(f"{app.address}/v1/chat/completions", json=body) as response:
            first = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)
        assert b'"ech"' in first
        await wait_for(lambda: large.closed)  # the client disconnected, and so the upstream's reply ends


async def test_a_stream_that_is_cut_is_cut_for_the_client_and_not_recorded(large, tmp_path):
    async with pass_on(large.url, tmp_path / "logs") as (app, recorder):
        with pytest.raises(httpx.RemoteProtocolError):
            await post(app, "cut", stream=True)
        await written(recorder, 1)
    (record,) = read_records(tmp_path / "logs")
    assert (record["status"], record["error_str"]) == ("failure", "cut")
    assert "response" not in record
    assert "proxy_server_request" not in record


async def test_an_upstream_that_is_down_gives_502_without_its_address(large, tmp_path):
    async with pass_on("http://127.0.0.1:9/v1", tmp_path / "logs") as (app, recorder):
        answer = await post(app, "hi")
        await written(recorder, 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unavailable")
    assert ":9" not in answer.text
    assert KEY not in answer.text
    assert recorder.counts == {"failed": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_dialect_is_recorded_and_imported(tmp_path, stream):
    """The upstream is a server of ours, which speaks four APIs; each client calls a tool."""
    logs, tool = tmp_path / "logs", {"type": "function", "function": TOOL}
    anthropics = [{"name": "add", "input_schema": TOOL["parameters"]}]
    async with (
        serve({"m": Pieces(lambda request: TEXT)}) as upstream,
        pass_on(f"{upstream.address}/v1", logs) as (app, recorder),
        async_openai(app) as client,
        async_anthropic(app) as anthropic,
    ):
        more = {"stream": stream, "model": "m"}
        replies = [
            await client.chat.completions.create(messages=says("chat"), tools=[tool], **more),
            await client.responses.create(
                input="respond", instructions="Be brief.", tools=[{"type": "function", **TOOL}], **more
            ),
            await anthropic.messages.create(
                messages=says("message"), system="Be kind.", tools=anthropics, max_tokens=99, **more
            ),
            await client.completions.create(prompt="complete", **more),
        ]
        for reply in replies if stream else ():
            assert [event async for event in reply]
        await written(recorder, 4)
    assert recorder.counts == {"recorded": 4}
    rows, report = rows_of(logs, tmp_path)
    assert report.records == {"litellm": 4}
    found = {row["messages"][-2]["content"]: row for row in rows}
    assert found.keys() == {"chat", "respond", "message", "complete"}
    for name in ("chat", "respond", "message"):
        (call,) = found[name]["messages"][-1]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1, "b": 2})
        assert found[name]["tools"][0]["function"]["name"] == "add"
    assert found["respond"]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert found["message"]["messages"][0] == {"role": "system", "content": "Be kind."}
    records = read_records(logs)
    assert all(record["response_time"] > 0 and record["startTime"] <= record["endTime"] for record in records)
    assert all(record["model"] == "m" for record in records)


async def test_tokens_latency_and_price_are_recorded(large, tmp_path):
    prices = {"large-1": {"prompt": 2.5, "completion": 10}}
    async with pass_on(large.url, tmp_path / "logs", prices=prices) as (app, recorder):
        await post(app, "one")
        await post(app, "two", stream=True)
        await written(recorder, 2)
    for record in read_records(tmp_path / "logs"):
        assert (record["prompt_tokens"], record["completion_tokens"]) == (8, 2)
        assert record["response_cost"] == pytest.approx((8 * 2.5 + 2 * 10) / 1e6)
        assert record["model"] == "large-1"


async def test_what_failed_or_ended_at_a_limit_is_counted_without_its_content(large, tmp_path):
    async with pass_on(large.url, tmp_path / "logs") as (app, recorder):
        for text in ("busy", "broken", "wrong", "long"):
            await post(app, text)
        await written(recorder, 4)
        async with http(app) as client:
            assert 'reinforge_records_total{outcome="failed"} 4.0' in (await client.get("/metrics")).text
    assert recorder.counts == {"failed": 4}
    records = read_records(tmp_path / "logs")
    assert {record.get("response") for record in records} == {None}
    assert sorted(record["error_code"] for record in records) == [200, 200, 429, 500]
    with pytest.raises(ConfigError, match="LiteLLM calls that failed"):
        rows_of(tmp_path / "logs", tmp_path)


async def test_no_key_is_written(large, tmp_path):
    mcp = {"type": "mcp", "server_url": "https://x.org", "authorization": "secret-of-a-server", "headers": {"a": "b"}}
    async with pass_on(large.url, tmp_path / "logs") as (app, recorder):
        await post(app, f"my key is {KEY}", tools=[mcp])
        await written(recorder, 1)
    (path,) = (tmp_path / "logs").glob("*.jsonl")
    text = path.read_text()
    assert KEY not in text
    assert "secret-of-a-server" not in text
    assert "https://x.org" in text
    assert path.stat().st_mode & 0o077 == 0


async def test_only_users_who_agreed_are_recorded(large, tmp_path):
    consent = {"header": "x-consent", "value": "yes", "keys": [hashlib.sha256(b"agreed-key").hexdigest()]}
    async with pass_on(large.url, tmp_path / "logs", consent=consent) as (app, recorder):
        await post(app, "one", headers={**USER, "x-consent": "yes"})
        await post(app, "two", headers={"authorization": "Bearer agreed-key"})
        await post(app, "three", headers={**USER, "x-consent": "no"})
        await written(recorder, 3)
    assert recorder.counts == {"recorded": 2, "no_consent": 1}


async def test_what_is_to_be_removed_is_never_written(large, tmp_path):
    (tmp_path / "clean.py").write_text(
        "def keep(exchange):\n"
        "    if 'private' in str(exchange):\n"
        "        return None\n"
        "    exchange['request'].pop('user', None)\n"
        "    return exchange\n"
    )
    settings = {"remove": [r"\b\d{4}\b"], "change": "clean:keep"}
    async with pass_on(large.url, tmp_path / "logs", project_root=tmp_path, **settings) as (app, recorder):
        await post(app, "my pin is 1234", user="anna", stream=True)
        await post(app, "private")
        await written(recorder, 2)
    assert recorder.counts == {"recorded": 1, "withheld": 1}
    (row,), _ = rows_of(tmp_path / "logs", tmp_path)
    assert [message["content"] for message in row["messages"]] == [
        "my pin is [removed]",
        "echo my pin is [removed]",
    ]
    assert "anna" not in next((tmp_path / "logs").glob("*.jsonl")).read_text()


async def test_a_share_keeps_whole_conversations(large, tmp_path):
    """The later requests of a conversation, which repeat its beginning, are recorded with the first or not at all."""
    async with pass_on(large.url, tmp_path / "logs", share=0.5) as (app, recorder):
        async with http(app, headers=USER) as client:
            for number in range(40):
                messages = says(f"question {number}")
                for turn in range(2):
                    body = {"model": "large", "messages": messages}
                    answer = await client.post("/v1/chat/completions", json=body)
                    messages = [*messages, answer.json()["choices"][0]["message"], *says(f"again {turn}")]
        await written(recorder, 80)
    rows, _ = rows_of(tmp_path / "logs", tmp_path)
    assert 10 <= len(rows) <= 30
    assert recorder.counts["recorded"] == 2 * len({row["conversation"] for row in rows})


async def test_requests_pass_when_nothing_can_be_recorded(large, tmp_path, caplog):
    (tmp_path / "faulty.py").write_text("def fail(exchange):\n    raise RuntimeError('no')\n")
    async with pass_on(large.url, tmp_path / "logs", project_root=tmp_path, change="faulty:fail") as (app, recorder):
        for _ in range(3):
            assert (await post(app, "hi")).status_code == 200
        await written(recorder, 3)
    assert recorder.counts == {"error": 3}
    assert [message for message in caplog.messages if "recording failed" in message][1:] == []
    async with pass_on(large.url, tmp_path / "gone") as (app, recorder):
        (tmp_path / "gone").rmdir()
        assert (await post(app, "hi")).status_code == 200
        await written(recorder, 1)
    assert recorder.counts == {"error": 1}


async def test_a_full_folder_and_old_files(large, tmp_path):
    logs, today = tmp_path / "logs", datetime.now(UTC).date()
    logs.mkdir()
    for days in (0, 6, 7):
        (logs / f"requests-{today - timedelta(days=days)}.jsonl").write_text("{}\n" * 400)
    (logs / "mine.jsonl").write_text("{}\n")
    async with pass_on(large.url, logs, days=7, max_mb=0.002) as (app, recorder):
        await post(app, "hi")
        await written(recorder, 1)
    assert recorder.counts == {"full": 1}
    assert sorted(path.name for path in logs.iterdir()) == [
        "mine.jsonl",
        f"requests-{today - timedelta(days=6)}.jsonl",
        f"requests-{today}.jsonl",
    ]


async def test_a_key_of_the_servers_own_is_in_a_header_of_its_own(large):
    token = "sk-reinforge-0123456789abcdef"
    async with pass_on(large.url, token=token) as (app, _):
        refused = await post(app, "hi")
        passed = await post(app, "hi", headers={**USER, "x-reinforge-key": token})
    assert (refused.status_code, passed.status_code) == (401, 200)
    ((_, _, headers, _),) = large.requests
    assert headers["authorization"] == USER["authorization"]
    assert "x-reinforge-key" not in headers


async def test_a_conversation_that_the_upstream_keeps_is_not_recorded(tmp_path):
    async with (
        serve({"m": ScriptedPolicy()}) as upstream,
        pass_on(f"{upstream.address}/v1", tmp_path / "logs") as (app, recorder),
        http(app) as client,
    ):
        await client.post("/v1/responses", json={"model": "m", "input": "hi", "previous_response_id": "resp_1"})
        await written(recorder, 1)
    assert recorder.counts == {"not_whole": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record: {share: 2}", "expected a number ≤ 1"),
        ("record: {remove: ['(']}", "invalid regular expression"),
        ("record: {consent: {keys: [abc]}}", "sha256sum"),
        ("record: {shares: 1}", "share"),
        ("share: 1", "record:"),
    ],
)
def test_a_wrong_record_block_is_refused(tmp_path, text, message):
    path = tmp_path / "record.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_record_config(path)


def test_a_record_block_is_read(tmp_path):
    path = tmp_path / "record.yml"
    path.write_text("record:\n  share: 0.25\n  days: 30\n  prices: {large: {prompt: 1, completion: 2}}\n")
    config = read_record_config(path)
    assert (config.share, config.days, config.prices["large"].completion) == (0.25, 30, 2.0)


def test_the_record_block_of_the_page_is_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (text,) = re.findall(r"```yaml\n(# record.yml.*?)```", page, re.DOTALL)
    path = tmp_path / "record.yml"
    path.write_text(text)
    config = read_record_config(path)
    assert config.model_fields_set == config.model_dump().keys(), "the page shows every setting"


async def test_a_responses_call_with_reasoning_in_its_input_is_imported(tmp_path):
    items = [*says("hi"), {"type": "reasoning", "id": "rs_1", "summary": []}]
    items += [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        *says("more"),
    ]
    async with (
        serve({"m": ScriptedPolicy()}) as upstream,
        pass_on(f"{upstream.address}/v1", tmp_path / "logs") as (app, recorder),
        http(app) as client,
    ):
        await client.post("/v1/responses", json={"model": "m", "input": items})
        await written(recorder, 1)
    assert recorder.counts == {"recorded": 1}
    (row,), _ = rows_of(tmp_path / "logs", tmp_path)
    assert [message["content"] for message in row["messages"]] == ["hi", "yes", "more", "yes"]


def test_a_streamed_tool_call_is_put_together():
    pieces = [
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "sub", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    events = [{"choices": [{"index": 0, "delta": piece}]} for piece in pieces]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events).encode()
    kind = "text/event-stream"
    message = read_answer(CHAT, body, kind)["choices"][0]["message"]
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert calls == [("a", "add", '{"a": 1}'), ("b", "sub", "{}")]
    with pytest.raises(CutAnswerError, match="cut"):
        read_answer(CHAT, body[: body.index(b"finish_reason") - 40].rpartition(b"data:")[0], kind)
