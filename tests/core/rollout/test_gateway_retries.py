"""A request that a client sends again is sampled once; a request that an agent repeats is sampled again."""

import asyncio
import json

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from reinforge.rollout import gateway as server
from reinforge.rollout.gateway import Gateway
from reinforge.rollout.http import gateway_access
from reinforge.rollout.http.exchange import EndpointResponse
from tests.doubles import ScriptedPolicy
from tests.gateway import CHAT, Episode, HeldPolicy, ask, open_connection, read_response, text_of, write_request

HELLO = [{"role": "user", "content": "hello?"}]


@pytest.fixture
async def episode():
    return Episode(HeldPolicy(held=False))


@pytest.fixture
async def access(gateway, episode):
    with gateway.attach(episode.endpoint) as access:
        yield access


async def retry(access, count=1, body=CHAT):
    status, _, content = await ask(access, body, x_stainless_retry_count=count)
    assert status == 200
    return text_of(content)


async def test_a_retry_gets_the_reply_that_was_sampled(access, episode):
    _, _, first = await ask(access, x_stainless_retry_count=0)
    assert [text_of(first), await retry(access, 1), await retry(access, 2)] == ["reply 0"] * 3
    assert episode.replies == ["reply 0"]


async def test_a_retry_during_sampling_waits_for_the_same_reply(gateway):
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        first = asyncio.create_task(ask(access))
        await episode.policy.asked.wait()
        reader, writer = await open_connection(access)
        writer.write(write_request(access, x_stainless_retry_count=1))
        second = asyncio.create_task(read_response(reader))
        while all(each.num_retries == 0 for each in access._replies._replies):
            await asyncio.sleep(0)
        episode.policy.release.set()
        assert [text_of((await each)[2]) for each in (first, second)] == ["reply 0"] * 2
        writer.close()
    assert episode.replies == ["reply 0"]


async def test_what_an_agent_repeats_on_purpose_is_sampled_again(access, episode):
    assert [text_of((await ask(access))[2]) for _ in range(2)] == ["reply 0", "reply 1"]
    assert episode.replies == ["reply 0", "reply 1"]


async def test_a_retry_of_something_else_is_a_call(access, episode):
    await ask(access)
    other = {**CHAT, "messages": HELLO}
    assert await retry(access, 1, other) == "reply 1"
    status, _, _ = await ask(access, {**CHAT, "prompt": 3}, path="/completions", x_stainless_retry_count=1)
    assert status == 400
    assert len(episode.replies) == 2


async def test_a_retry_after_an_error_is_a_call(gateway):
    answers = iter([RuntimeError("broken"), "well"])
    episode = Episode(ScriptedPolicy(lambda request: next(answers)))
    with gateway.attach(episode.endpoint) as access:
        assert (await ask(access))[0] == 500
        assert await retry(access) == "well"


async def test_the_reply_that_reached_no_client_is_what_a_retry_gets(gateway):
    """Two equal requests at once: one is answered, the other's client hangs up and tries again."""
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        _, gone = await open_connection(access)
        gone.write(write_request(access))
        await episode.policy.asked.wait()
        patient = asyncio.create_task(ask(access))
        while episode.policy.most < 2:
            await asyncio.sleep(0)
        gone.transport.abort()
        episode.policy.release.set()
        assert text_of((await patient)[2]) == "reply 1"
        await access.wait_closed()
        assert await retry(access) == "reply 0"
    assert sorted(episode.replies) == ["reply 0", "reply 1"]


async def test_a_call_whose_client_hangs_up_is_recorded_once(gateway):
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        _, writer = await open_connection(access)
        writer.write(write_request(access, {**CHAT, "stream": True}))
        await episode.policy.asked.wait()
        writer.transport.abort()
        episode.policy.release.set()
        await access.wait_closed()
        assert episode.replies == ["reply 0"]
        assert (await ask(access))[0] == 200
    assert episode.replies == ["reply 0", "reply 1"]


async def hang_up_while_waiting(gateway):
    """Three requests, of which the second one's client hangs up while it waits; returns how many were sampled."""
    episode = Episode(HeldPolicy())
    with gateway.attach(episode.endpoint) as access:
        first = asyncio.create_task(ask(access))
        await episode.policy.asked.wait()
        _, writer = await open_connection(access)
        writer.write(write_request(access))
        while not access.slots._waiters:
            await asyncio.sleep(0)
        writer.transport.abort()
        while len(gateway._server.connections) > 1 and gateway._server.connections[-1].transport is not None:
            await asyncio.sleep(0)
        episode.policy.release.set()
        await first
        assert (await ask(access))[0] == 200
    return len(episode.replies)


async def test_a_client_that_hangs_up_while_it_waits_is_never_sampled(gateway, caplog, set_limit):
    set_limit("calls_in_flight", 1)
    assert await hang_up_while_waiting(gateway) == 2
    assert not caplog.records


async def test_without_the_check_a_client_that_has_hung_up_is_sampled(gateway, monkeypatch, set_limit):
    """Mutation check: its body is read although the connection is gone, and it is not asked whether it listens."""

    async def read(request, **limits):
        return json.dumps(CHAT).encode()

    set_limit("calls_in_flight", 1)
    monkeypatch.setattr(server, "_check_connected", lambda request: None)
    monkeypatch.setattr(server, "read_body", read)
    assert await hang_up_while_waiting(gateway) == 3


async def test_an_idempotency_key_belongs_to_one_request(access, episode):
    replies = [await ask(access, idempotency_key="k") for _ in range(2)]
    assert [text_of(body) for _, _, body in replies] == ["reply 0"] * 2
    status, headers, body = await ask(access, {**CHAT, "messages": HELLO}, idempotency_key="k")
    assert (status, json.loads(body)["error"]["code"]) == (409, "idempotency_key_reused")
    assert headers["x-should-retry"] == "false"
    assert episode.replies == ["reply 0"]


@pytest.mark.parametrize("count", ["-1", "many", "", "²", "1" * 400])
async def test_a_retry_count_that_is_none_is_no_retry(access, episode, count):
    await ask(access)
    status, _, _ = await ask(access, x_stainless_retry_count=count.encode().decode("latin-1"))
    assert status == 200
    assert len(episode.replies) == 2


class CuttingProxy:
    """Passes connections on, and drops the first one when its response comes."""

    def __init__(self, access):
        self._port = int(access.base_url.split(":")[2].partition("/")[0])
        self.num_cut = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info):
        self._server.close()

    async def _serve(self, reader, writer):
        upstream, sending = await asyncio.open_connection("127.0.0.1", self._port)
        pumping = asyncio.ensure_future(self._pump(reader, sending))
        data = await upstream.read(1 << 16)
        if self.num_cut == 0:
            self.num_cut += 1
            writer.transport.abort()
        while data and not writer.transport.is_closing():
            writer.write(data)
            data = await upstream.read(1 << 16)
        pumping.cancel()
        sending.close()
        writer.close()

    async def _pump(self, reader, sending):
        while data := await reader.read(1 << 16):
            sending.write(data)


async def call_openai(url, access):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=access.api_key, max_retries=2) as client:
        reply = await client.chat.completions.create(model="agent", messages=HELLO)
    return reply.choices[0].message.content


async def stream_openai(url, access):
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=access.api_key, max_retries=2) as client:
        stream = await client.chat.completions.create(model="agent", messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def call_anthropic(url, access):
    async with AsyncAnthropic(base_url=url, api_key=access.api_key, max_retries=2) as client:
        return (await client.messages.create(model="agent", max_tokens=9, messages=HELLO)).content[0].text


CLIENTS = [call_openai, stream_openai, call_anthropic]


async def call_through_proxy(call, access, monkeypatch):
    async with CuttingProxy(access) as proxy:
        monkeypatch.setattr(Gateway, "_check_origin", lambda self, request: None)  # the proxy has another port
        reply = await call(f"http://127.0.0.1:{proxy.port}/episodes/{access.episode_id}", access)
        assert proxy.num_cut == 1
    return reply


@pytest.mark.parametrize("call", CLIENTS)
async def test_an_official_client_that_lost_the_response_trains_one_call(access, episode, monkeypatch, call):
    assert await call_through_proxy(call, access, monkeypatch) == "reply 0"
    assert episode.replies == ["reply 0"]


@pytest.mark.parametrize("call", CLIENTS)
async def test_without_the_record_of_replies_it_trains_two(access, episode, monkeypatch, call):
    monkeypatch.setattr(gateway_access.SentReplies, "find", lambda self, digest, headers: None)
    assert await call_through_proxy(call, access, monkeypatch) == "reply 1"
    assert episode.replies == ["reply 0", "reply 1"]


def is_kept(replies, number):
    return replies.find(b"%d" % number, {"x-stainless-retry-count": "1"}) is not None


@pytest.mark.parametrize(
    ("size", "bounds", "kept"),
    [
        (1, {"kept_replies": 3}, [False, False, True, True, True]),
        (10, {"kept_reply_bytes": 25}, [False, False, False, True, True]),
        (10, {"kept_reply_bytes": 5}, [False, False, False, False, True]),
        (10, {}, [True] * 5),
    ],
)
async def test_the_oldest_replies_are_dropped(size, bounds, kept, set_limit):
    for name, value in bounds.items():
        set_limit(name, value)
    replies = gateway_access.SentReplies()
    for number in range(5):
        response = asyncio.Future()
        replies.add(gateway_access.SentReply(b"%d" % number, response))
        response.set_result(EndpointResponse(200, {}, b"x" * size))
        await asyncio.sleep(0)
    assert [is_kept(replies, number) for number in range(5)] == kept


async def test_a_request_that_is_being_answered_is_never_dropped(set_limit):
    set_limit("kept_replies", 2)
    replies = gateway_access.SentReplies()
    for number in range(5):
        response = asyncio.Future()
        replies.add(gateway_access.SentReply(b"%d" % number, response))
        if number:
            response.set_result(EndpointResponse(200, {}, b"x"))
        await asyncio.sleep(0)
    assert [is_kept(replies, number) for number in range(5)] == [True, False, False, False, True]
