"""The gateway with the official clients: what they ask for is sampled once and recorded."""

import asyncio
import json
import sys
from dataclasses import replace

import httpx
import pytest
from anthropic import AsyncAnthropic, NotFoundError
from openai import APIStatusError, AsyncOpenAI, BadRequestError

from reinforge.rollout import gateway as server
from reinforge.rollout.gateway import Gateway
from reinforge.types.request import TokenLogprob
from tests.doubles import ScriptedPolicy
from tests.gateway import CHAT, Episode, HeldPolicy, ask, open_connection, read_response, text_of, write_request
from tests.replies import read_events

HELLO = [{"role": "user", "content": "hello?"}]


@pytest.fixture
async def episode():
    return Episode(ScriptedPolicy(lambda request: "a reply of five words"))


@pytest.fixture
async def openai(gateway, episode):
    with gateway.attach(episode.endpoint) as access:
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            yield client


@pytest.fixture
async def anthropic(gateway, episode):
    with gateway.attach(episode.endpoint) as access:
        url = access.environment()["ANTHROPIC_BASE_URL"]
        async with AsyncAnthropic(base_url=url, api_key=access.api_key, max_retries=0) as client:
            yield client


class NamingPolicy(ScriptedPolicy):
    """Names as many likely tokens as it is asked for at each position: "a0", "a1", ..."""

    async def sample(self, request):
        reply = await super().sample(request)
        top = tuple(TokenLogprob(f"a{i}", -1.0 - i) for i in range(request.num_top_logprobs))
        return replace(reply, tokens=replace(reply.tokens, top_logprobs=(top,) * len(reply.tokens.token_ids)))


async def test_the_most_likely_tokens_are_in_each_format(gateway):
    episode = Episode(NamingPolicy())
    with gateway.attach(episode.endpoint) as access:
        async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0) as client:
            chat = await client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2)
            text = await client.completions.create(model="m", prompt="hello", logprobs=2)
            with pytest.raises(BadRequestError, match="top_logprobs must be a whole number from 0 to 20, found 21"):
                await client.completions.create(model="m", prompt="hello", logprobs=21)
    for each in chat.choices[0].logprobs.content:
        assert [(top.token, top.bytes, top.logprob) for top in each.top_logprobs] == [
            ("a0", [97, 48], -1.0),
            ("a1", [97, 49], -2.0),
        ]
    found = text.choices[0].logprobs
    assert found.top_logprobs == [{"a0": -1.0, "a1": -2.0}] * len(found.tokens)


async def test_text_completions_streamed_and_not(openai, episode):
    reply = await openai.completions.create(model="agent", prompt="hello", max_tokens=100)
    chunks = await openai.completions.create(model="agent", prompt=[1, 2], max_tokens=100, stream=True)
    streamed = "".join([chunk.choices[0].text async for chunk in chunks])
    assert (reply.choices[0].text, streamed) == ("a reply of five words",) * 2
    assert [call.request.prompt for call in episode.capture.calls] == ["hello", (1, 2)]


async def test_the_environment_is_all_that_the_official_clients_need(gateway, episode, monkeypatch):
    with gateway.attach(episode.endpoint) as access:
        for name, value in access.environment().items():
            monkeypatch.setenv(name, value)
        async with AsyncOpenAI() as openai, AsyncAnthropic() as anthropic:
            await openai.responses.create(model="agent", input="hello?")
            await anthropic.messages.create(model="agent", max_tokens=9, messages=HELLO)
    assert len(episode.capture.calls) == 2


async def test_the_key_alone_says_which_episode(gateway):
    first, second = Episode(), Episode()
    with gateway.attach(first.endpoint), gateway.attach(second.endpoint) as access:
        for headers in ({}, {"authorization": None, "x_api_key": access.api_key}):
            status, _, _ = await ask(access, path="/v1/chat/completions", **headers)
            assert status == 200
    assert (len(first.capture.calls), len(second.capture.calls)) == (0, 2)


async def test_an_error_of_either_api_has_the_message_and_the_type_of_its_client(openai, anthropic, gateway):
    with pytest.raises(APIStatusError, match="temperature") as failure:
        await openai.chat.completions.create(model="agent", messages=HELLO, temperature="hot")  # type: ignore[arg-type]
    assert failure.value.status_code == 400
    episode = Episode(entries=("agent", "judge"))
    with gateway.attach(episode.endpoint) as access:
        url = access.environment()["ANTHROPIC_BASE_URL"]
        async with AsyncAnthropic(base_url=url, api_key=access.api_key) as client:
            with pytest.raises(NotFoundError, match="llms has: agent, judge"):
                await client.messages.create(model="claude", max_tokens=9, messages=HELLO)


async def ask_at_another_address(gateway):
    """Asks at 127.0.0.2, an address of this machine on Linux that is not the gateway's; returns the status."""
    with gateway.attach(Episode().endpoint) as access:
        reader, writer = await asyncio.open_connection("127.0.0.2", gateway.port)
        writer.write(write_request(access, host=f"localhost:{gateway.port}"))
        status, _, _ = await read_response(reader)
        writer.close()
    return status


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no 127.0.0.2")
async def test_another_address_of_this_machine_is_not_answered(gateway):
    with pytest.raises(ConnectionRefusedError):
        await ask_at_another_address(gateway)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no 127.0.0.2")
async def test_without_the_loopback_every_address_is_answered(monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(server, "LOOPBACK", "0.0.0.0")
    async with Gateway() as gateway:
        assert await ask_at_another_address(gateway) == 200


async def test_a_connection_is_used_again(gateway):
    with gateway.attach(Episode().endpoint) as access:
        reader, writer = await open_connection(access)
        for _ in range(3):
            writer.write(write_request(access))
            status, headers, _ = await read_response(reader)
            assert status == 200
            assert headers["server"] == "reinforge"
        writer.close()


async def test_too_many_requests_wait_and_none_is_lost(gateway, set_limit):
    set_limit("calls_in_flight", 4)
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        asking = [asyncio.create_task(ask(access)) for _ in range(40)]
        while episode.policy.most < 4:
            await asyncio.sleep(0)
        episode.policy.release.set()
        answers = await asyncio.gather(*asking)
    assert sorted(text_of(body) for _, _, body in answers) == sorted(f"reply {number}" for number in range(40))
    assert episode.policy.most == 4
    assert len(episode.capture.calls) == 40


async def test_without_the_bound_all_requests_are_sampled_at_once(gateway, set_limit):
    set_limit("calls_in_flight", 10**6)
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        asking = [asyncio.create_task(ask(access)) for _ in range(40)]
        while episode.policy.most < 40:
            await asyncio.sleep(0)
        episode.policy.release.set()
        await asyncio.gather(*asking)


async def test_the_end_of_an_episode_cancels_its_calls_and_tells_their_clients(gateway):
    episode, other = Episode(HeldPolicy()), Episode(HeldPolicy())
    with gateway.attach(other.endpoint) as open_door:
        with gateway.attach(episode.endpoint) as access:
            asking, waiting = asyncio.create_task(ask(access)), asyncio.create_task(ask(open_door))
            await asyncio.gather(episode.policy.asked.wait(), other.policy.asked.wait())
        status, _, body = await asking
        assert (status, json.loads(body)["error"]["code"]) == (410, "episode_ended")
        await access.wait_closed()
        assert episode.capture.calls == []
        assert episode.capture.pending == 0
        other.policy.release.set()
        assert (await waiting)[0] == 200


async def test_the_end_of_the_gateway_waits_for_what_it_cancels():
    episode = Episode(HeldPolicy())
    async with Gateway() as gateway:
        access = gateway.attach(episode.endpoint)
        asking = asyncio.create_task(ask(access))
        await episode.policy.asked.wait()
    assert (await asking)[0] == 410
    assert episode.capture.pending == 0
    with pytest.raises(OSError, match="."):
        await open_connection(access)


async def test_a_long_stream_lets_other_requests_through(gateway):
    text = "word " * 3000
    episode = Episode(ScriptedPolicy(lambda request: text))
    with gateway.attach(episode.endpoint) as access:
        status, headers, body = await ask(access, {**CHAT, "stream": True})
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert body.endswith(b"data: [DONE]\n\n")


async def test_geminis_api_with_its_key_in_a_header_or_in_the_address(gateway, episode):
    body = {"contents": [{"parts": [{"text": "hello?"}]}]}
    with gateway.attach(episode.endpoint) as access:
        environment = access.environment()
        models = f"{environment['GOOGLE_GEMINI_BASE_URL']}/v1beta/models"
        key = environment["GEMINI_API_KEY"]
        async with httpx.AsyncClient(headers={"x-goog-api-key": key}, base_url=models) as client:
            whole = (await client.post("/any/m-2.5:generateContent", json=body)).json()
            counted = await client.post("/agent:countTokens", json={"generateContentRequest": body})
            embedded = await client.post("/agent:embedContent", json=body)
            refused = await client.post("/agent:generateContent", json={"contents": []})
        async with httpx.AsyncClient() as client:
            streamed = await client.post(f"{models}/agent:streamGenerateContent?alt=sse&key={key}", json=body)
            keyless = await client.post(f"{models}/agent:generateContent?key=wrong", json=body)
    texts = [part["text"] for part in whole["candidates"][0]["content"]["parts"]]
    assert (texts, whole["modelVersion"]) == (["a reply of five words"], "any/m-2.5")
    events = read_events([streamed.content])
    assert "".join(each["candidates"][0]["content"]["parts"][0]["text"] for each in events) == texts[0]
    assert (counted.status_code, counted.json()["error"]["status"]) == (404, "NOT_FOUND"), "the model is a double"
    assert "POST .../v1/embeddings" in embedded.json()["error"]["message"]
    assert (refused.json()["error"]["status"], keyless.status_code) == ("INVALID_ARGUMENT", 401)
    assert (
        episode.capture.refused_call
        == "/v1beta/models/agent:generateContent 400: contents: expected at least one content"
    )
