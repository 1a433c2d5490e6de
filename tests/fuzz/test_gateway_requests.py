"""Any request to the gateway is answered, with an error of its API where it is bad, and never with a failure."""

import asyncio
import json
import sys

from hypothesis import strategies as st

from reinforge.rollout.gateway import Gateway
from tests.doubles import ScriptedPolicy
from tests.fuzz.fuzzing import TEXTS, VALUES, damage, fuzzed
from tests.gateway import Episode, ask, open_connection, write_request

TEXT_PART = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "name": "f", "parameters": {}},
    {"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}},
    {"type": "web_search"},
]
ITEMS = [
    {"role": "user", "content": "a"},
    {"role": "user", "content": [TEXT_PART]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT_PART]}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "image_url", "image_url": {"url": "data:"}},
]
SOUND = {
    "model": ["scripted", "gpt-4o"],
    "messages": [[ITEMS[0]], ITEMS],
    "input": ["a", [ITEMS[0]], ITEMS],
    "prompt": ["a", ["a"], [1, 2], [[1]]],
    "system": ["a", [TEXT_PART]],
    "instructions": ["a"],
    "max_tokens": [1, 100],
    "max_output_tokens": [9],
    "max_completion_tokens": [9],
    "temperature": [0, 0.5],
    "top_p": [1],
    "top_k": [4],
    "n": [1, 3],
    "stop": ["a", ["a", "b"]],
    "stop_sequences": [["a"]],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "tools": [TOOLS, TOOLS[:1]],
    "tool_choice": ["auto", "required", {"type": "function", "name": "f"}, {"type": "tool", "name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}],
    "text": [{"format": {"type": "text"}}],
    "thinking": [{"type": "enabled", "budget_tokens": 9}],
    "reasoning": [{"effort": "low"}],
    "logprobs": [True, 3],
    "logit_bias": [{"5": 1}],
    "seed": [3],
    "metadata": [{"a": "b"}],
}
"""Values of the fields of all APIs, each of which some API takes."""


FIELDS = {name: st.sampled_from(values) | st.sampled_from(values).flatmap(damage) for name, values in SOUND.items()}
USER = [{"role": "user", "content": "a"}]
BASES = {
    "/chat/completions": {"messages": USER},
    "/completions": {"prompt": "a"},
    "/responses": {"input": "a"},
    "/messages": {"max_tokens": 9, "messages": USER},
    "/messages/count_tokens": {"messages": USER},
    "/embeddings": {"input": "a"},
}


@st.composite
def requests(draw, model="agent"):
    """Draws a path, and a body that is sound but for a few fields."""
    path = draw(st.sampled_from(sorted(BASES)))
    names = draw(st.lists(st.sampled_from(sorted(SOUND)), max_size=4, unique=True))
    body = {**BASES[path], "model": model, **{name: draw(FIELDS[name]) for name in names}}
    return path, draw(st.one_of(st.just(body), st.just(body), st.just(body), VALUES))


METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH", "TRACE", "FOO"]
PATHS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=60)
HEADERS = st.dictionaries(
    st.sampled_from(["origin", "host", "authorization", "content-encoding", "expect", "content-type",
                     "x-stainless-retry-count", "idempotency-key", "transfer-encoding"]),
    TEXTS.map(lambda text: text.replace("\r", "").replace("\n", "")), max_size=3,
)  # fmt: skip


async def send(check):
    episode = Episode(ScriptedPolicy(lambda request: "four"))
    async with Gateway() as gateway:
        with gateway.attach(episode.endpoint) as access:
            await check(access)
    assert episode.capture.pending == 0


def write_json(value):
    """Returns the JSON of a value, also of what Python alone writes: NaN, half a surrogate, numbers of 5,000 digits."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, default=str, skipkeys=True).encode()
    finally:
        sys.set_int_max_str_digits(limit)


@fuzzed(requests(), quick=30)
def test_any_body_is_answered_or_refused(request):
    path, body = request

    async def check(access):
        status, headers, content = await ask(access, write_json(body), path=path)
        assert status < 500, content
        if headers.get("content-type", "").startswith("application/json"):
            answer = json.loads(content)
            assert status == 200 or answer["error"]["message"]

    asyncio.run(send(check))


@fuzzed(st.sampled_from(METHODS), PATHS, HEADERS, st.binary(max_size=200), quick=30)
def test_any_request_is_answered(method, path, headers, body):
    async def check(access):
        named = {
            name.replace("-", "_"): value.encode("utf-8", "replace").decode("latin-1")
            for name, value in headers.items()
        }
        reader, writer = await open_connection(access)
        writer.write(write_request(access, body, path=f"/v1/{path}", method=method, **named))
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert not answer or int(answer.split()[1]) < 500, answer

    asyncio.run(send(check))


@fuzzed(st.lists(st.binary(max_size=100), max_size=4), quick=25)
def test_any_bytes_are_answered_or_cut(pieces):
    async def check(access):
        reader, writer = await open_connection(access)
        for piece in pieces:
            writer.write(piece)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert not answer or answer.startswith(b"HTTP/1."), answer
        assert b" 50" not in answer[:13], answer

    asyncio.run(send(check))
