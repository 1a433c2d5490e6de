"""A client that hangs up stops the sampling of its reply; one that does not read is given up."""

import asyncio
import json
from contextlib import contextmanager

import pytest

from reinforge.errors import BackendUnavailable
from reinforge.serving import app as app_module
from reinforge.serving import routes
from reinforge.serving.routes import ServerLimits
from reinforge.types.request import ReplyPiece, TokenLogprobs
from tests.doubles import ScriptedPolicy
from tests.serving.serving import http, says, serve, wait_for

ASK = {"model": "m", "messages": says("hi")}
CHAT = "/v1/chat/completions"


class Endless(ScriptedPolicy):
    def __init__(self, text="word "):
        super().__init__()
        self.text, self.num_running, self.num_stopped = text, 0, 0

    @contextmanager
    def counted(self):
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.num_stopped += 1

    async def sample(self, request):
        with self.counted():
            await asyncio.sleep(25)  # longer than `wait_for` waits

    async def stream(self, request, markers=()):
        with self.counted():
            while True:
                yield ReplyPiece(self.text, TokenLogprobs((1,), (2,), (-1.0,), texts=(self.text,)))
                await asyncio.sleep(0)


async def open_chat(app, **fields):
    body = json.dumps({**ASK, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    lines = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(lines.encode() + body)
    return reader, writer


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_sampling_stops(n, stream):
    policy = Endless()
    async with serve({"m": policy}) as app:
        reader, writer = await open_chat(app, stream=stream, n=n)
        if stream:
            assert b"word" in await reader.readuntil(b"word")
        await wait_for(lambda: policy.num_running == n)
        writer.close()
        await wait_for(lambda: policy.num_stopped == n and not app.models.find("m").num_in_flight)
        assert policy.num_running == 0
        async with http(app) as client:
            counted = (await client.get("/metrics")).text
        assert 'reinforge_requests_total{method="POST",route="/v1/chat/completions",status="499"} 1.0' in counted


async def test_without_the_mark_sampling_goes_on(monkeypatch):
    monkeypatch.setattr(routes, "_ABORTABLE", "never")
    policy = Endless()
    app_context = serve({"m": policy})
    app = await app_context.__aenter__()
    _, writer = await open_chat(app)
    await wait_for(lambda: policy.num_running == 1)
    writer.close()
    await wait_for(lambda: not app._runner.server.connections)
    assert policy.num_running == 1
    for task in list(app._running):
        task.cancel()
    await app_context.__aexit__(None, None, None)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_stops_cuts_off_what_lasts(monkeypatch, stream):
    """Else Ctrl-C would wait for every stream; the limit of the HTTP library plays no part here."""
    monkeypatch.setattr(app_module, "SHUTDOWN_S", 0.05)
    monkeypatch.setattr(app_module, "ABORTED_S", 1000.0)
    policy = Endless()
    async with serve({"m": policy}) as app:
        _, writer = await open_chat(app, stream=stream)
        await wait_for(lambda: policy.num_running == 1)
    assert (policy.num_running, policy.num_stopped) == (0, 1)
    writer.close()


async def test_a_client_that_does_not_read_is_given_up():
    policy = Endless("x" * 10_000)
    async with serve({"m": policy}, limits=ServerLimits(write_timeout_s=0.05)) as app:
        _, writer = await open_chat(app, stream=True)
        await wait_for(lambda: policy.num_stopped == 1)
        writer.close()


async def test_a_failure_before_the_first_token_has_its_status_and_one_after_it_ends_the_stream():
    class Failing(ScriptedPolicy):
        """Fails, at once or after one token."""

        async def stream(self, request, markers=()):
            if request.messages[0]["content"] == "late":
                yield ReplyPiece("word", TokenLogprobs((1,), (2,), (-1.0,), texts=("word",)))
            raise ValueError("this cannot be sampled")

    import openai

    from tests.serving.serving import async_openai

    async with serve({"m": Failing()}) as app, async_openai(app) as client:
        with pytest.raises(openai.BadRequestError, match="this cannot be sampled"):
            await client.chat.completions.create(model="m", messages=says("now"), stream=True)
        stream = await client.chat.completions.create(model="m", messages=says("late"), stream=True)
        texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match="this cannot be sampled"):
            await anext(stream)
    assert texts == ["", "word"]


async def test_closing_a_stream_frees_its_row_of_the_batch(engine):
    from reinforge.types.request import ModelRequest, SamplingParams

    policy = engine.policy
    before = policy.stats()
    stream = policy.stream(ModelRequest(says("hi"), SamplingParams(seed=1, ignore_eos=True)))
    first = await anext(stream)
    assert first.tokens.token_ids
    await stream.aclose()
    await wait_for(lambda: policy.stats().running == 0)
    assert policy.stats().sampled_tokens - before.sampled_tokens < policy.max_model_len - 10
    reply = await policy.sample(ModelRequest(says("hi"), SamplingParams(max_tokens=3)))
    assert reply.num_completion_tokens <= 3


class Unreachable(ScriptedPolicy):
    """Fails as a backend does whose connection is lost, after some tokens."""

    def __init__(self, num_tokens):
        super().__init__()
        self.num_tokens = num_tokens

    async def sample(self, request):
        raise BackendUnavailable("the backend does not respond")

    async def stream(self, request, markers=()):
        for _ in range(self.num_tokens):
            yield ReplyPiece("word", TokenLogprobs((1,), (2,), (-1.0,), texts=("word",)))
        raise BackendUnavailable("the backend does not respond")


@pytest.mark.parametrize(("stream", "num_tokens"), [(False, 0), (True, 0), (True, 1)])
async def test_a_backend_that_hangs_up_is_no_client_that_does(stream, num_tokens):
    async with serve({"m": Unreachable(num_tokens)}) as app, http(app) as client:
        response = await client.post(CHAT, json={**ASK, "stream": stream})
    assert response.status_code == (200 if num_tokens else 503)
    error = json.loads(response.text.rpartition("data: {")[2].join(["{", ""]) if num_tokens else response.text)
    assert (error["error"]["message"], error["error"]["code"]) == (
        "the backend does not respond",
        "backend_unavailable",
    )
