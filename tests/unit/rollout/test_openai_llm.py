"""The OpenAI-compatible model over real HTTP: requests, replies and failures."""

from __future__ import annotations

import asyncio
import logging
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import stamina
from pydantic import SecretStr

from reinforge.config.loader import build_config
from reinforge.errors import BackendError, BackendUnavailable, ConfigError
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.openai_client import OpenAIChat
from reinforge.rollout.openai_config import OPENAI_URL, OpenAILLMConfig, is_metadata_host, resolve_endpoint
from reinforge.rollout.openai_http import MAX_WAIT_S, SafeResolver, parse_retry_after
from reinforge.rollout.openai_llm import openai_llm
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from tests.openai_server import OpenAIServer, Step, cut, fails, page, says, slow

KEY = "sk-canary-7f3a"
HELLO = [{"role": "user", "content": "hello?"}]


@pytest.fixture(autouse=True)
def _no_backoff() -> Any:
    with stamina.set_testing(True, attempts=10, cap=True):
        yield


async def ask(*script: Step, request: ModelRequest | None = None, **settings: Any) -> tuple[ModelReply, OpenAIServer]:
    async with OpenAIServer(*script) as server:
        config = OpenAILLMConfig(model_name="gpt", base_url=server.url, **settings)
        model = OpenAIChat(config, server.url, SecretStr(KEY))
        try:
            return await model.sample(request or ModelRequest(HELLO)), server
        finally:
            await model.close()


async def test_a_reply_has_text_and_token_counts_but_no_tokens() -> None:
    reply, server = await ask(says("hi", logprobs=[1], token_ids=[1, 2]))
    assert reply.message == {"role": "assistant", "content": "hi"}
    assert (reply.finish_reason, reply.tokens) == ("stop", None), (
        "never trained, even if the endpoint returns log-probs"
    )
    assert (reply.num_prompt_tokens, reply.num_completion_tokens) == (7, 3)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.bodies == [{"model": "gpt", "messages": HELLO, "temperature": 1.0}]


async def test_tool_calls_and_refusals_are_kept() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    reply, server = await ask(says(None, tool_calls=calls, refusal="no"), request=ModelRequest(HELLO, tools=tools))
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": calls, "refusal": "no"}
    assert server.bodies[0]["tools"] == tools


async def test_the_callers_arguments_override_the_configuration() -> None:
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4, stop=("x",), seed=3)
    _, server = await ask(says(), request=ModelRequest(HELLO, sampling), temperature=0.1, max_tokens=9)
    asked = {key: value for key, value in server.bodies[0].items() if key not in ("model", "messages")}
    assert asked == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 4, "stop": ["x"], "seed": 3}
    request = ModelRequest(HELLO, arguments={"max_completion_tokens": 5, "reasoning_effort": "low"})
    _, server = await ask(says(), request=request, temperature=0.1, max_tokens=9, extra_body={"top_k": 4})
    asked = {key: value for key, value in server.bodies[0].items() if key not in ("model", "messages")}
    assert asked == {"temperature": 0.1, "max_completion_tokens": 5, "reasoning_effort": "low", "top_k": 4}


async def test_the_agents_arguments_are_forwarded() -> None:
    async with OpenAIServer(says("5")) as server:
        model = OpenAIChat(OpenAILLMConfig(model_name="gpt", base_url=server.url), server.url)
        capture = Capture(seed=1)
        llm = AsyncLLM("gpt", model, capture, SamplingParams(temperature=0.7))
        done = await llm.chat.completions.create(
            messages=HELLO, model="other", temperature=0, tool_choice="auto", logprobs=True, extra_body={"top_k": 2}
        )
        with pytest.raises(TypeError, match="does not support: extra_headers"):
            await llm.chat.completions.create(messages=HELLO, extra_headers={"Authorization": "x"})
        await model.close()
    assert (done.choices[0].message.content, done.choices[0].logprobs, done.usage.total_tokens) == ("5", None, 10)
    (body,) = server.bodies
    assert body == {"model": "gpt", "messages": HELLO, "temperature": 0, "tool_choice": "auto", "top_k": 2}
    assert "Authorization" not in server.headers[0]
    assert capture.calls[0].reply.tokens is None


async def test_several_choices_are_requested_at_once() -> None:
    async with OpenAIServer(says("5", choices=["6", "7"]), says("8")) as server:
        model = OpenAIChat(OpenAILLMConfig(model_name="gpt", base_url=server.url), server.url)
        capture = Capture(seed=1)
        llm = AsyncLLM("gpt", model, capture, None)
        done = await llm.chat.completions.create(messages=HELLO, n=3)
        with pytest.raises(BackendError, match="requested n = 2 choices, received 1"):
            await llm.chat.completions.create(messages=HELLO, n=2)
        await model.close()
    assert [choice.message.content for choice in done.choices] == ["5", "6", "7"]
    assert [body["n"] for body in server.bodies] == [3, 2]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 3), "the endpoint reports only the sum"


@pytest.mark.parametrize("fault", [fails(429), fails(408), fails(409), fails(500), fails(503), page(502), cut])
async def test_temporary_failures_are_retried(fault: Step) -> None:
    reply, server = await ask(fault, fault, says("at last"))
    assert (reply.message["content"], len(server.bodies)) == ("at last", 3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fails(429), "429 broken 429 (3 attempts)"),
        (fails(500), "500 broken 500 (3 attempts)"),
        (page(502), "502 Bad gateway (3 attempts)"),
        (cut, "(3 attempts)"),
        (slow(5), "no response within 0.05 s (3 attempts)"),
    ],
)
async def test_after_the_last_attempt_the_backend_is_unavailable(fault: Step, message: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        await ask(fault, timeout_s=0.05 if "within" in message else 5)
    assert message in str(caught.value)
    assert "/v1/chat/completions" in str(caught.value)


async def test_a_refused_connection_is_unavailable() -> None:
    model = OpenAIChat(OpenAILLMConfig(model_name="gpt", max_retries=0), "http://127.0.0.1:9/v1")
    with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1.*\(1 attempts\)"):
        await model.sample(ModelRequest(HELLO))
    await model.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fails(401, '{"error": {"message": "bad key", "code": "invalid_api_key"}}'), "401 invalid_api_key: bad key"),
        (fails(404, '{"detail": "Not Found"}'), "404 Not Found"),
        (fails(422), "422 broken 422"),
        (fails(409, x_should_retry="false"), "409 broken 409"),
        (fails(307, location="http://169.254.169.254/"), "redirects are not followed"),
        (page(200), "the response is not a chat completion: Bad gateway"),
        (lambda request, _: __import__("aiohttp").web.json_response({"choices": []}), "is not a chat completion"),
        (fails(200, "[" * 100_000), "is not a chat completion"),
        (fails(400, "\x00"), "400"),
    ],
)
async def test_permanent_failures_are_not_retried(answer: Step, message: str) -> None:
    with pytest.raises(BackendError) as caught:
        await ask(answer, says("never asked"))
    assert message in str(caught.value)
    assert not isinstance(caught.value, BackendUnavailable)


async def test_retries_wait_as_long_as_the_server_asks() -> None:
    with stamina.set_testing(False):
        _, server = await ask(fails(429, retry_after_ms="150"), fails(503, retry_after="0.2"), says())
    first, second, third = server.times
    assert 0.15 <= second - first < 0.45
    assert 0.2 <= third - second < 0.5
    with pytest.raises(BackendUnavailable, match="the server asks to wait 3600 s"):
        await ask(fails(429, retry_after="3600"), says("never asked"))


def test_every_form_of_retry_after_is_parsed() -> None:
    assert parse_retry_after({"retry-after": "2"}) == 2.0
    assert parse_retry_after({"retry-after-ms": "2500", "retry-after": "9"}) == 2.5
    assert parse_retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert (parse_retry_after({"retry-after": "Fri, 21 Oct 2101 07:28:00 GMT"}) or 0) > MAX_WAIT_S
    assert parse_retry_after({"retry-after": "soon"}) is parse_retry_after({}) is None


async def test_cancelling_ends_the_call() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(slow(30)), 0.1)


async def test_the_key_is_redacted_if_the_server_repeats_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for step, error in ((fails(401, f"Incorrect key {KEY}"), BackendError), (fails(500, KEY), BackendUnavailable)):
        with pytest.raises(error) as caught:
            await ask(step)
        assert KEY not in "".join(traceback.format_exception(caught.value))
    assert "***" in str(caught.value)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "expected a URL such as"),
        ("ftp://host/v1", "expected a URL such as"),
        ("https://me:secret@host/v1", "contains a user or password"),
        ("https://host/v1?key=1", r"contains \? or #"),
        ("https://host/v1/chat/completions", "up to /v1"),
        ("http://169.254.169.254/latest", "metadata service"),
        ("http://[fe80::1]/v1", "metadata service"),
        ("http://[::ffff:169.254.169.254]/v1", "metadata service"),
        ("http://metadata.google.internal/v1", "metadata service"),
    ],
)
def test_an_invalid_base_url_is_rejected(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_config({"llms": {"x": {"_type": "openai", "model_name": "m", "base_url": url}}})
    assert "llms.x.base_url" in str(caught.value)
    assert "secret" not in str(caught.value).replace("the URL contains a user or password", "")


async def test_a_name_that_resolves_to_a_metadata_address_is_blocked() -> None:
    """DNS rebinding: the name was harmless when the configuration was read."""
    assert is_metadata_host("169.254.169.254")
    assert not is_metadata_host("10.0.0.1")
    resolver = SafeResolver()
    with pytest.raises(OSError, match="link-local"):
        await resolver.resolve("169.254.169.254", 80)
    assert await resolver.resolve("127.0.0.1", 80)


def test_the_environments_key_is_not_sent_to_a_configured_base_url() -> None:
    environ = {"OPENAI_API_KEY": KEY}
    url, key = resolve_endpoint(OpenAILLMConfig(model_name="m"), environ)
    assert (url, key and key.get_secret_value()) == (OPENAI_URL, KEY)
    url, key = resolve_endpoint(OpenAILLMConfig(model_name="m", base_url="http://elsewhere/v1"), environ)
    assert (url, key) == ("http://elsewhere/v1", None)
    assert (
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_BASE_URL": "http://here/v1/"})[0] == "http://here/v1"
    )
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set"):
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {})
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL: expected a URL"):
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_BASE_URL": "here"})


async def test_a_key_in_the_file_or_sent_unencrypted_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"_type": "openai", "model_name": "m", "base_url": "http://far.example/v1", "api_key": KEY}
    loaded = build_config({"llms": {"x": settings}})
    async for model in openai_llm(loaded.config.llms["x"], SimpleNamespace(config=loaded.config, loaded=loaded)):
        assert (model.is_policy, model.model_name, model.endpoint) == (False, "m", "http://far.example/v1")
    assert "llms.x.api_key is written in the configuration" in caplog.text
    assert "sent to far.example unencrypted" in caplog.text
    assert KEY not in caplog.text
