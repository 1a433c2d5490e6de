"""Long bodies are read in another process, to the same calls and refusals; it can be killed, and ends when idle."""

import json
import os

import psutil
import pytest
from pydantic import TypeAdapter

from reinforge.dialects.chat_call import BadRequest
from reinforge.serving import app as app_module
from reinforge.serving import reader as reader_module
from reinforge.serving.chat import READ_CALL, read_call
from reinforge.serving.reader import BodyReader
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve, wait_for
from tests.serving.test_limits import CHAT, FUNCTION

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {}}}}}


BODIES = [
    (CHAT, {"messages": says("h\ud83d é"), "tools": [FUNCTION], "logit_bias": {"1": 2.5}, "seed": 3}),
    (CHAT, {"messages": says("hi"), "response_format": SCHEMA, "logprobs": True, "seed": 1 << 62}),
    ("/v1/completions", {"prompt": [1, 2, 3], "stream": True, "seed": 4, "n": 2}),
    ("/v1/responses", {"input": "hi", "instructions": "x"}),
    ("/v1/messages/count_tokens", {"messages": says("hi"), "system": "s", "stop_sequences": ["q"]}),
]


@pytest.mark.slow
async def test_a_long_body_becomes_the_same_call_and_one_that_takes_too_long_is_refused(monkeypatch):
    reader = BodyReader()
    for path, fields in BODIES:
        arguments = json.dumps({"model": "m", **fields}).encode(), path, 128, 100
        call, there = await reader.read(read_call, *arguments, kind=READ_CALL, short=0)
        own, here = read_call(*arguments)
        assert (call, there.num_choices) == (own, here.num_choices)
        assert "seed" not in fields or there.requests == here.requests
    monkeypatch.setattr(reader_module, "READ_S", 0.5)
    with pytest.raises(BadRequest, match="too much time"):
        await reader.read(os.system, b"sleep 9", kind=TypeAdapter(int), short=0)
    monkeypatch.undo()
    assert await reader.read(os.system, b"true", kind=TypeAdapter(int), short=0) == 0
    await reader.close()


@pytest.mark.slow
async def test_the_process_begins_with_a_long_body_and_ends_without_one(monkeypatch):
    monkeypatch.setattr(app_module, "TRIM_S", 0.5)
    monkeypatch.setattr(reader_module, "IDLE_S", 2.0)
    num_before = len(psutil.Process().children())
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        for text, number in (("hi", 0), ("hi" * 100_000, 1)):
            assert (await client.post(CHAT, json={"model": "m", "messages": says(text)})).status_code == 200
            assert len(psutil.Process().children()) == number + num_before
        await wait_for(lambda: len(psutil.Process().children()) == num_before)
