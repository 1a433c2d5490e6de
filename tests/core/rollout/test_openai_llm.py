"""The OpenAI-compatible model over real HTTP: requests, replies and failures."""

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
import traceback
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import stamina
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from reinforge.config.loader import build_config, load_config
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, InvalidCall
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.models import endpoint_config
from reinforge.rollout.models.endpoint_config import OPENAI_URL, is_metadata_host, resolve_endpoint
from reinforge.rollout.models.openai_client import OpenAIChat, OpenAILLMConfig, openai_llm
from reinforge.rollout.models.openai_http import MAX_WAIT_S, SafeResolver, parse_retry_after
from reinforge.types.request import Grammar, ModelRequest, SamplingParams
from tests.openai_server import OpenAIServer, cut, fails, page, says, slow

pytestmark = pytest.mark.usefixtures("_no_backoff")
KEY = "sk-canary-7f3a"
HELLO = [{"role": "user", "content": "hello?"}]


@asynccontextmanager
async def serve(*script, **settings):
    async with OpenAIServer(*script) as server:
        config = OpenAILLMConfig(model_name="gpt", base_url=server.url, **settings)
        model = OpenAIChat(config, server.url, SecretStr(KEY))
        try:
            yield server, model, AsyncLLM("gpt", model, Capture(seed=1), SamplingParams(temperature=0.7))
        finally:
            await model.close()


async def ask(*script, request=None, **settings):
    async with serve(*script, **settings) as (server, model, _):
        return await model.sample(request or ModelRequest(HELLO)), server


async def test_a_reply_has_text_and_token_counts_but_no_tokens():
    reply, server = await ask(says("hi", logprobs=[1], token_ids=[1, 2]))
    assert reply.message == {"role": "assistant", "content": "hi"}
    assert (reply.finish_reason, reply.tokens, reply.logprobs) == ("stop", None, None)
    assert (reply.num_prompt_tokens, reply.num_completion_tokens) == (7, 3)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.bodies == [{"model": "gpt", "messages": HELLO, "temperature": 1.0}]


def returns(choice, **fields):
    listed = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}, **choice}]
    return lambda request, _: web.json_response({"choices": listed, **fields})


TOKEN = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": [{"token": "ho", "logprob": -2.0}]}


async def test_logprobs_and_token_ids_are_requested_and_kept_as_the_endpoint_returns_them():
    step = returns({"logprobs": {"content": [TOKEN]}, "token_ids": [7]}, prompt_token_ids=[1, 2])
    reply, server = await ask(step, logprobs=True, top_logprobs=1, seed=3)
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"], server.bodies[0]["seed"]) == (True, 1, 3)
    assert reply.logprobs == {"content": [TOKEN], "token_ids": [7], "prompt_token_ids": [1, 2]}
    assert (reply.tokens, reply.version) == (None, None), "nothing that the embedded engine would train"
    _, server = await ask(step, top_logprobs=2)
    assert server.bodies[0]["logprobs"] is True, "the API takes top_logprobs only with logprobs"


async def test_tokens_that_are_spelled_as_ids_are_ids():
    content = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:12", "logprob": -1.0}]
    reply, _ = await ask(returns({"logprobs": {"content": content}}), logprobs=True)
    assert reply.logprobs == {"content": content, "token_ids": [7, 12]}


async def test_an_agent_reads_logprobs_as_from_openais_client():
    async with serve(returns({"logprobs": {"content": [TOKEN]}})) as (server, _, llm):
        done = await llm.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=1)
    found = done.choices[0].logprobs
    assert (found.content[0].token, found.content[0].logprob, found.refusal) == ("hi", -0.5, None)
    assert found.content[0].top_logprobs[0].logprob == -2.0
    assert json.loads(json.dumps(found)) == {"content": [TOKEN]}
    assert [server.bodies[0][key] for key in ("logprobs", "top_logprobs")] == [True, 1]


@pytest.mark.parametrize("bad", [{"token": "hi", "logprob": None}, {"token": 3, "logprob": -1}, {"logprob": -1}, "hi"])
async def test_unreadable_logprobs_are_an_error_only_where_they_were_requested(bad):
    step = returns({"logprobs": {"content": [bad]}, "token_ids": ["x"]}, prompt_token_ids="no")
    reply, _ = await ask(step)
    assert (reply.message["content"], reply.logprobs) == ("hi", None)
    with pytest.raises(BackendError, match=r"choices\[0\].logprobs.content\[0\].* expected"):
        await ask(step, logprobs=True)


async def test_an_endpoint_that_ignores_logprobs_is_reported_once(caplog):
    async with serve(says("hi"), logprobs=True) as (server, model, _):
        for _ in range(3):
            assert (await model.sample(ModelRequest(HELLO))).logprobs is None
        expected = f"{server.url}/chat/completions returns no log-probs, although they were requested"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_the_names_of_other_clients_are_accepted():
    config = OpenAILLMConfig(**{"model": "gpt", "request_timeout": 7})
    assert (config.model_name, config.timeout_s) == ("gpt", 7.0)


async def test_tool_calls_and_refusals_are_kept():
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    reply, server = await ask(says(None, tool_calls=calls, refusal="no"), request=ModelRequest(HELLO, tools=tools))
    assert reply.message == {"role": "assistant", "content": None, "tool_calls": calls, "refusal": "no"}
    assert server.bodies[0]["tools"] == tools


async def test_the_callers_arguments_override_the_configuration():
    sampling = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=4, stop=("x",), seed=3)
    _, server = await ask(says(), request=ModelRequest(HELLO, sampling), temperature=0.1, max_tokens=9)
    asked = {key: value for key, value in server.bodies[0].items() if key not in ("model", "messages")}
    assert asked == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 4, "stop": ["x"], "seed": 3}
    request = ModelRequest(HELLO, arguments={"max_completion_tokens": 5, "reasoning_effort": "low"})
    _, server = await ask(says(), request=request, temperature=0.1, max_tokens=9, extra_body={"top_k": 4})
    asked = {key: value for key, value in server.bodies[0].items() if key not in ("model", "messages")}
    assert asked == {"temperature": 0.1, "max_completion_tokens": 5, "reasoning_effort": "low", "top_k": 4}


async def test_what_a_hosted_policy_is_asked_for_is_sent_or_refused():
    """Its requests come without the agent's own arguments, as the run has read them."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    sampling = SamplingParams(seed=1, frequency_penalty=0.5, presence_penalty=-1, logit_bias=((5, 1.5),))
    schema = {"type": "array"}
    template = {"reasoning_effort": "low", "enable_thinking": False}
    request = ModelRequest(
        HELLO, sampling, tools, template, tool_choice="add", parallel_tool_calls=False,
        grammar=Grammar("json_schema", json.dumps(schema)),
    )  # fmt: skip
    _, server = await ask(says(), request=request)
    assert server.bodies[0] == {
        "model": "gpt", "messages": HELLO, "tools": tools, "temperature": 1.0, "seed": 1, "frequency_penalty": 0.5,
        "presence_penalty": -1, "logit_bias": {"5": 1.5}, "parallel_tool_calls": False, "reasoning_effort": "low",
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}},
        "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    plain = ModelRequest(HELLO, tool_choice="required", grammar=Grammar("json_schema", '{"type":"object"}'))
    _, server = await ask(says(), request=plain)
    assert server.bodies[0]["tool_choice"] == "required"
    assert server.bodies[0]["response_format"] == {"type": "json_object"}
    for refused in (ModelRequest(HELLO, grammar=Grammar("regex", "a")), ModelRequest(HELLO, prompt="a")):
        with pytest.raises(InvalidCall, match="use a JSON schema|use messages"):
            await ask(says(), request=refused)


async def test_the_agents_arguments_are_forwarded():
    async with serve(says("5")) as (server, _, llm):
        done = await llm.chat.completions.create(
            messages=HELLO, model="other", temperature=0, tool_choice="auto", logprobs=True, extra_body={"top_k": 2}
        )
        with pytest.raises(TypeError, match="does not support: extra_headers"):
            await llm.chat.completions.create(messages=HELLO, extra_headers={"Authorization": "x"})
    assert (done.choices[0].message.content, done.choices[0].logprobs, done.usage.total_tokens) == ("5", None, 10)
    (body,) = server.bodies
    forwarded = {"temperature": 0, "tool_choice": "auto", "top_k": 2, "logprobs": True}
    assert body == {"model": "gpt", "messages": HELLO, **forwarded}
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_several_choices_are_requested_at_once():
    async with serve(says("5", choices=["6", "7"]), says("8")) as (server, _, llm):
        done = await llm.chat.completions.create(messages=HELLO, n=3)
        with pytest.raises(BackendError, match="requested n = 2 choices, received 1"):
            await llm.chat.completions.create(messages=HELLO, n=2)
    assert [choice.message.content for choice in done.choices] == ["5", "6", "7"]
    assert [body["n"] for body in server.bodies] == [3, 2]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (7, 3), "the endpoint reports only the sum"


@pytest.mark.parametrize("fault", [fails(429), fails(408), fails(409), fails(500), fails(503), page(502), cut])
async def test_temporary_failures_are_retried(fault):
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
async def test_after_the_last_attempt_the_backend_is_unavailable(fault, message):
    with pytest.raises(BackendUnavailable) as caught:
        await ask(fault, timeout_s=0.05 if "within" in message else 5)
    assert message in str(caught.value)
    assert "/v1/chat/completions" in str(caught.value)


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
async def test_permanent_failures_are_not_retried(answer, message):
    with pytest.raises(BackendError) as caught:
        await ask(answer, says("never asked"))
    assert message in str(caught.value)
    assert not isinstance(caught.value, BackendUnavailable)


async def test_retries_wait_as_long_as_the_server_asks():
    with stamina.set_testing(False):
        _, server = await ask(fails(429, retry_after_ms="150"), fails(503, retry_after="0.2"), says())
    first, second, third = server.times
    assert 0.15 <= second - first < 5
    assert 0.2 <= third - second < 5
    with pytest.raises(BackendUnavailable, match="the server asks to wait 3600 s"):
        await ask(fails(429, retry_after="3600"), says("never asked"))


def test_every_form_of_retry_after_is_parsed():
    assert parse_retry_after({"retry-after": "2"}) == 2.0
    assert parse_retry_after({"retry-after-ms": "2500", "retry-after": "9"}) == 2.5
    assert parse_retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert (parse_retry_after({"retry-after": "Fri, 21 Oct 2101 07:28:00 GMT"}) or 0) > MAX_WAIT_S
    assert parse_retry_after({"retry-after": "soon"}) is parse_retry_after({}) is None


async def test_cancelling_ends_the_call():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(slow(30)), 0.1)


async def test_the_key_is_redacted_if_the_server_repeats_it(caplog):
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
    ],
)
def test_an_invalid_base_url_is_rejected(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build_config({"llms": {"x": {"_type": "openai", "model_name": "m", "base_url": url}}})
    assert "llms.x.base_url" in str(caught.value)
    assert "secret" not in str(caught.value).replace("the URL contains a user or password", "")


METADATA_SPELLINGS = [
    "169.254.169.254", "169.254.169.254.", "2852039166", "0xA9FEA9FE", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376",
    "025177524776", "169.254.43518", "169.16689662", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]",
    "[0:0:0:0:0:FFFF:A9FE:A9FE]", "[::169.254.169.254]", "[::ffff:0:169.254.169.254]", "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]", "[64:ff9b:1::a9fe:a9fe]", "[2002:a9fe:a9fe::]", "[fe80::1]", "[fe80::1%25eth0]",
    "[fd00:ec2::254]", "[fd00:0ec2:0:0:0:0:0:254]", "[FD00:EC2::254]", "[fd20:ce::254]", "100.100.100.200",
    "[::ffff:100.100.100.200]", "192.0.0.192", "168.63.129.16", "169.254.170.2", "169.254.0.1",
    "\uff11\uff16\uff19.254.169.254", "169\u3002254\u3002169\u3002254", "%31%36%39.254.169.254",
    "metadata.google.internal", "METADATA.GOOGLE.INTERNAL.", "metadata.goog", "instance-data.ec2.internal",
]  # fmt: skip
OTHER_HOSTS = [
    "localhost", "127.0.0.1", "[::1]", "10.0.0.1", "192.168.1.2", "[fd12:3456::1]", "[64:ff9b::8.8.8.8]", "8.8.8.8",
    "api.openai.com", "169.253.169.254", "metadata.example.com", "2130706433", "dead.beef", "[2001:db8::1]",
]  # fmt: skip


@pytest.mark.parametrize("host", METADATA_SPELLINGS)
def test_every_spelling_of_a_metadata_address_is_refused(host):
    settings = {"_type": "openai", "model_name": "m", "base_url": f"http://{host}/v1"}
    with pytest.raises(ConfigError, match="is a link-local address or a cloud's metadata service, which is blocked"):
        build_config({"llms": {"x": settings}})
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL: .*metadata service"):
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_BASE_URL": f"https://{host}:8080"})


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_other_hosts_are_accepted(host):
    assert OpenAILLMConfig(model_name="m", base_url=f"http://{host}/v1").base_url == f"http://{host}/v1"


def test_without_the_embedded_addresses_an_ipv6_spelling_passes(monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(endpoint_config, "_list_embedded", lambda address: [])
    assert is_metadata_host("169.254.169.254")
    assert not is_metadata_host("64:ff9b::a9fe:a9fe")


def test_the_host_that_the_client_reads_is_checked_again():
    with pytest.raises(ConfigError, match="metadata service"):
        OpenAIChat(OpenAILLMConfig(model_name="m"), "http://169.254.169.254/v1")


BAD_KEYS = {
    "sk-canary\rx": "character 10 of 11 (U+000D) is a line break",
    "sk-canary\nsk-canary-2": "character 10 of 21 (U+000A) is a line break",
    "sk canary": "character 3 of 9 (U+0020) is a space",
    "sk-canary\u00a0x": "character 10 of 11 (U+00A0) is a space",
    "\ufeffsk-canary": "character 1 of 10 (U+FEFF) is not plain ASCII",
    "sk-canary-\u00e9": "character 11 of 11 (U+00E9) is not plain ASCII",
    "sk-canary\x00": "character 10 of 10 (U+0000) is not plain ASCII",
    "sk-canary\ud800": "character 10 of 10 (U+D800) is not plain ASCII",
}


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_no_header_can_hold_is_refused_with_its_variables_name(key, tmp_path):
    file = tmp_path / "run.yml"
    file.write_text("llms:\n  x:\n    _type: openai\n    model_name: m\n    api_key: ${JUDGE_KEY}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={"JUDGE_KEY": key})
    expected = f"run.yml:5:5 llms.x.api_key: ${{JUDGE_KEY}}: this is not an API key: {BAD_KEYS[key]}"
    assert expected in str(caught.value)
    with pytest.raises(ConfigError) as in_environment:
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_API_KEY": key})
    assert f"the environment variable OPENAI_API_KEY: this is not an API key: {BAD_KEYS[key]}" in str(
        in_environment.value
    )
    with pytest.raises(ValueError, match="this is not an API key") as in_python:
        OpenAILLMConfig(model_name="m", api_key=key)
    for error in (caught.value, in_environment.value, in_python.value):
        assert "canary" not in f"{error}{error!r}" + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n", " ", "\t"])
async def test_whitespace_after_a_key_is_not_sent(end, caplog, tmp_path):
    """Half of all keys that are read from a file end with a line break."""
    async with OpenAIServer(says("hi")) as server:
        file = tmp_path / "run.yml"
        file.write_text(
            f"llms:\n  x:\n    _type: openai\n    model_name: m\n    base_url: {server.url}\n    api_key: ${{MY_KEY}}\n"
        )
        loaded = load_config(file, environ={"MY_KEY": KEY + end})
        builder = SimpleNamespace(config=loaded.config, loaded=loaded)
        async for model in openai_llm(loaded.config.llms["x"], builder):
            assert (await model.sample(ModelRequest(HELLO))).message["content"] == "hi"
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert "llms.x.api_key (${MY_KEY}) begins or ends with whitespace, such as a line break" in caplog.text
    _, key = resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_API_KEY": KEY + end})
    assert key is not None
    assert key.get_secret_value() == KEY
    assert "OPENAI_API_KEY begins or ends with whitespace" in caplog.text
    assert KEY not in caplog.text


def test_an_empty_key_is_no_key():
    assert OpenAILLMConfig(model_name="m", api_key=" \n").api_key is None
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set"):
        resolve_endpoint(OpenAILLMConfig(model_name="m"), {"OPENAI_API_KEY": "\n"})


async def test_a_name_that_resolves_to_a_metadata_address_is_blocked():
    """DNS rebinding: the name was harmless when the configuration was read."""
    assert is_metadata_host("169.254.169.254")
    assert not is_metadata_host("10.0.0.1")
    resolver = SafeResolver()
    with pytest.raises(OSError, match="link-local"):
        await resolver.resolve("169.254.169.254", 80)
    assert await resolver.resolve("127.0.0.1", 80)


def test_the_environments_key_is_not_sent_to_a_configured_base_url():
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


async def test_a_key_in_the_file_or_sent_unencrypted_is_warned_about(caplog):
    settings = {"_type": "openai", "model_name": "m", "base_url": "http://far.example/v1", "api_key": KEY}
    loaded = build_config({"llms": {"x": settings}})
    async for model in openai_llm(loaded.config.llms["x"], SimpleNamespace(config=loaded.config, loaded=loaded)):
        assert (model.is_policy, model.model_name, model.endpoint) == (False, "m", "http://far.example/v1")
    assert "llms.x.api_key is written in the configuration" in caplog.text
    assert "sent to far.example unencrypted" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
async def test_a_self_signed_certificate_is_refused(tmp_path):
    key, signed = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", signed], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(signed, key)
    server = TestServer(web.Application(), scheme="https")
    await server.start_server(ssl=context)
    url = f"https://localhost:{server.port}/v1"
    model = OpenAIChat(OpenAILLMConfig(model_name="gpt", base_url=url, max_retries=0), url, SecretStr(KEY))
    with pytest.raises(BackendUnavailable, match="certificate verify failed"):
        await model.sample(ModelRequest(HELLO))
    await model.close()
    await server.close()
