"""What one client cannot do to a server: bodies without end, slow bytes, too many calls, too large calls."""

import asyncio
import contextlib
import ctypes
import sys

import psutil
import pytest

from reinforge.engine.sampling import sampler
from reinforge.serving import app as app_module
from reinforge.serving.routes import ServerLimits
from reinforge.types.request import CLIENT
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve, wait_for

ASK = {"model": "m", "messages": says("hi")}
CHAT = "/v1/chat/completions"


async def ask(app, key="any", **fields):
    async with http(app, headers={"authorization": f"Bearer {key}"}) as client:
        return await client.post(CHAT, json={**ASK, **fields})


class Held(ScriptedPolicy):
    """Answers when it is let go; notes the client of each request."""

    def __init__(self, num_waiting=0):
        super().__init__()
        self.go, self.clients, self.num_waiting = asyncio.Event(), [], num_waiting

    async def sample(self, request):
        self.requests.append(request)
        self.clients.append(CLIENT.get())
        await self.go.wait()
        return await super().sample(request)

    def count_waiting(self):
        return self.num_waiting


async def send_raw(app, *pieces):
    """Returns what the server answers to bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    received = b""
    with contextlib.suppress(ConnectionResetError):  # it may not have read all that was sent
        while piece := await reader.read(1 << 16):
            received += piece
    writer.close()
    return received


def head(app, *lines):
    first = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{app.port}\r\n"
    return (first + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode()


async def test_a_body_that_is_too_long_is_refused_before_it_is_read():
    async with serve({"m": ScriptedPolicy()}, limits=ServerLimits(max_body_bytes=1000)) as app:
        response = await ask(app, user="x" * 2000)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        announced = await send_raw(app, head(app, "content-length: 10000000000"))
        assert announced.startswith(b"HTTP/1.1 413")


async def test_the_bodies_of_all_clients_together_are_bounded():
    async with serve({"m": ScriptedPolicy()}, limits=ServerLimits(max_waiting_bytes=300_000)) as app:
        _, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(head(app, "content-length: 250000"))  # and nothing more
        await wait_for(lambda: app._waiting_bytes == 250_000)
        refused = await ask(app, user="x" * 100_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
        assert (await ask(app)).status_code == 200, "a short one harms nobody"
        writer.close()
        await wait_for(lambda: not app._waiting_bytes)
        assert (await ask(app, user="x" * 100_000)).status_code == 200


async def test_a_body_of_unknown_length_is_read_up_to_the_limit():
    async def endless():
        for _ in range(1000):
            yield b" " * 100

    async with serve({"m": ScriptedPolicy()}, limits=ServerLimits(max_body_bytes=1000)) as app, http(app) as client:
        assert (await client.post(CHAT, content=endless())).status_code == 413


async def test_a_slow_body_is_given_up():
    async with serve({"m": ScriptedPolicy()}, limits=ServerLimits(body_timeout_s=0.05)) as app:
        assert (await send_raw(app, head(app, "content-length: 100"), b"{")).startswith(b"HTTP/1.1 408")


async def test_a_slow_head_is_given_up():
    async with serve({"m": ScriptedPolicy()}, limits=ServerLimits(idle_timeout_s=0.05)) as app:
        assert await send_raw(app, b"POST /v1/chat/comp") == b""


async def test_calls_above_a_limit_are_refused_by_name():
    policy = ScriptedPolicy()
    async with serve({"m": policy}, limits=ServerLimits(max_tokens=8, max_choices=3)) as app:
        for fields, param in (
            ({"max_tokens": 9}, "max_tokens"),
            ({"max_completion_tokens": 9}, "max_completion_tokens"),
            ({"n": 4}, "n"),
            ({"n": 129}, "n"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"chat_template": "{{ x }}"}, "chat_template"),
        ):
            response = await ask(app, **fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert policy.requests == []


FUNCTION = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "a"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", **FUNCTION}] * 4097}


TOO_MANY = [
    (CHAT, {"messages": says("a") * 100_000}, 413, "more than 262,144 values"),
    (CHAT, {"messages": says("a") * 4097}, 400, "messages: expected at most 4096 entries"),
    (CHAT, {"messages": says([PART] * 4097)}, 400, "messages[0].content: expected at most 4096 entries"),
    (CHAT, {"messages": [*says("a"), CALLED]}, 400, "messages[1].tool_calls: expected at most 4096 entries"),
    (CHAT, {"tools": [FUNCTION] * 513}, 400, "tools may have 512 entries"),
    (CHAT, {"tools": [{**FUNCTION, "more": "x" * 300_000}]}, 400, "tools may have 262,144 characters"),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, 400, "logit_bias may have 4096 entries"),
    (CHAT, {"model": "y" * 1_000_000}, 404, "does not exist"),
    ("/v1/completions", {"prompt": [1] * 300_000}, 413, "more than 262,144 values"),
    ("/v1/responses", {"input": says("a") * 4097}, 400, "input: expected at most 4096 entries"),
    ("/v1/messages", {"messages": says("a") * 4097, "max_tokens": 1}, 400, "messages: expected at most 4096"),
]


@pytest.mark.slow
async def test_counts_above_a_limit_are_refused_before_anything_is_sampled(engine):
    policy = ScriptedPolicy()
    async with serve({"m": policy, "tiny": engine.policy}) as app, http(app) as client:
        for path, fields, status, named in TOO_MANY:
            base = ASK if path == CHAT else {"model": "m"}
            response = await client.post(path, json={**base, **fields})
            assert (response.status_code, named in response.text) == (status, True), response.text[:300]
            assert len(response.content) < 3000
        for body in (b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"[]"):
            response = await client.post(CHAT, content=body)
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
        long = await client.post(CHAT, json={"model": "tiny", "messages": says("many words " * 100_000)})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "1,100,028 characters" in long.text, "it is refused before it is tokenized"
    assert policy.requests == []


@pytest.mark.slow
async def test_other_clients_are_answered_while_a_long_body_is_read():
    """Its schema takes most of a second to check."""
    properties = {f"p{number}": {"type": "string"} for number in range(3000)}
    schema = {"name": "s", "schema": {"type": "object", "properties": properties}}
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        long = asyncio.ensure_future(ask(app, response_format={"type": "json_schema", "json_schema": schema}))
        answers = 0
        while not long.done():
            assert (await client.get("/healthz")).status_code == 200
            answers += 1
        assert long.result().status_code == 200
    assert answers > 3


async def test_a_reply_without_a_limit_gets_that_of_the_server():
    policy = ScriptedPolicy()
    async with serve({"m": policy}, limits=ServerLimits(max_tokens=8)) as app:
        assert (await ask(app)).status_code == 200
    assert policy.requests[0].sampling.max_tokens == 8


async def test_too_many_calls_at_a_time_get_429_and_a_time_to_wait():
    policy = Held(num_waiting=1)
    async with serve({"m": policy}, limits=ServerLimits(max_in_flight=2, retry_after_s=3)) as app:
        waiting = [asyncio.ensure_future(ask(app)) for _ in range(2)]
        await wait_for(lambda: len(policy.requests) == 2)
        refused = await ask(app)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")
        assert refused.headers["x-queue-position"] == "2", "one waits already"
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "place 2 in the queue: try again in 3 s" in error["message"]
        policy.go.set()
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200]
        assert (await ask(app)).status_code == 200


@pytest.mark.parametrize(("num_waiting", "wait_s"), [(39, range(4, 60)), (10_000, [60])])
async def test_the_time_to_wait_is_that_of_the_queue(num_waiting, wait_s):
    """One call at a time, each 0.1 s long or a little longer: the 40th place comes after 4 s."""
    policy = Held(num_waiting)
    async with serve({"m": policy}, limits=ServerLimits(max_in_flight=1)) as app:
        first = asyncio.ensure_future(ask(app))
        await wait_for(lambda: policy.clients)
        await asyncio.sleep(0.11)
        policy.go.set()
        assert (await first).status_code == 200
        policy.go.clear()
        second = asyncio.ensure_future(ask(app))
        await wait_for(lambda: len(policy.clients) == 2)
        refused = await ask(app)
        assert (refused.status_code, int(refused.headers["retry-after"]) in wait_s) == (429, True)
        policy.go.set()
        await second


async def test_a_client_cannot_keep_others_out():
    """Of 4 calls, A has all; B gets in with its share of 2, C with 4 // 3 = 1; 8 is the end."""
    policy = Held()
    async with serve({"m": policy}, limits=ServerLimits(max_in_flight=4)) as app:
        begun, found = [], []
        for key in "AAAAABBBCCDDEFGH":
            task = asyncio.ensure_future(ask(app, key))
            await wait_for(lambda task=task: task.done() or len(policy.clients) > len(begun))
            if task.done():
                assert task.result().status_code == 429
            else:
                begun.append(task)
                found.append(key)
        assert "".join(found) == "AAAABBCD"
        assert len(set(policy.clients[:4])) == len(set(policy.clients[4:6])) == 1
        assert len(set(policy.clients)) == 4
        policy.go.set()
        assert {response.status_code for response in await asyncio.gather(*begun)} == {200}
        assert (await ask(app, "A")).status_code == 200


async def test_addresses_in_a_request_are_never_opened():
    connections = []
    listener = await asyncio.start_server(lambda *streams: connections.append(streams), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/image.png"
    image = [{"type": "image_url", "image_url": {"url": url}}]
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        for content in (image, [{"type": "input_image", "image_url": url}], [{"type": "file", "file": url}]):
            response = await ask(app, messages=[{"role": "user", "content": content}])
            assert (response.status_code, "reads text only" in response.text) == (400, True)
        source = {"type": "image", "source": {"type": "url", "url": url}}
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [source]}]}
        assert (await client.post("/v1/messages", json=body)).status_code == 400
        body = {"model": url, "messages": says("hi")}
        assert (await client.post(CHAT, json=body)).status_code == 404
    listener.close()
    assert connections == []


async def test_the_methods_of_a_route_are_named():
    async with serve({"m": ScriptedPolicy()}) as app, http(app) as client:
        response = await client.get(CHAT)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        missing = await client.get("/v2/chat")
    assert missing.json()["error"]["message"] == "there is no GET /v2/chat here"


@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc")
async def test_freed_memory_goes_back_to_the_system(monkeypatch):
    """Blocks that are freed below one in use stay in the heap, until it is trimmed."""
    monkeypatch.setattr(app_module, "TRIM_S", 0.05)
    libc, process = ctypes.CDLL(None), psutil.Process()
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *freed, kept = [libc.malloc(60_000) for _ in range(2000)]
    for block in freed:
        ctypes.memset(block, 1, 60_000)
    for block in freed:
        libc.free(block)
    before = process.memory_info().rss
    async with serve({"m": ScriptedPolicy()}):
        await asyncio.wait_for(wait_for(lambda: process.memory_info().rss < before - 60_000_000), 30)
    libc.free(kept)


@pytest.mark.slow
async def test_the_kv_cache_of_long_requests_is_freed_once_it_is_not_used(engine, monkeypatch):
    """64 slots of one length: a long prompt beside short ones makes all of them long."""
    monkeypatch.setattr(app_module, "TRIM_S", 0.1)
    async with serve({"m": engine.policy}) as app:
        await asyncio.gather(*(ask(app, messages=says("a" * n), max_tokens=2) for n in [150, *[1] * 15]))
        grown = engine.policy.stats().kv_cache_bytes
        await asyncio.sleep(0.2)
        assert engine.policy.stats().kv_cache_bytes == grown, "it was needed a moment ago"
        monkeypatch.setattr(sampler, "UNUSED_S", 0.1)
        await wait_for(lambda: engine.policy.stats().kv_cache_bytes <= grown / 20)
