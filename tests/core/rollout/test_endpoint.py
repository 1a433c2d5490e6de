"""Bad requests get a response that says what is wrong, in the form of the API that was called; nothing is sampled."""

import json

import pytest

from reinforge.errors import BackendError, ConfigError, EngineError
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from reinforge.rollout.http.exchange import EndpointRequest
from reinforge.rollout.http.routes import LLMRoutes
from reinforge.types.request import SamplingParams
from tests.doubles import PolicyModel, ScriptedPolicy

CHAT = "/v1/chat/completions"
QUESTION = {"model": "agent", "messages": [{"role": "user", "content": "2 + 3?"}]}


def endpoint_of(policy, **options):
    capture = Capture(seed=1, **options)

    def find(name):
        return AsyncLLM(name, PolicyModel(policy), capture, SamplingParams())

    return EpisodeEndpoint(find, "agent", {"agent": "scripted"}, capture), capture


async def ask(body, path=CHAT, method="POST", policy=None, **options):
    endpoint, capture = endpoint_of(policy or ScriptedPolicy(), **options)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await endpoint.handle(EndpointRequest(method, path, {}, raw))
    return response, json.loads(response.body), capture


BAD_BODIES = {
    "no JSON": (b"{", "not JSON"),
    "no UTF-8": (b'{"model": "\xff"}', "not UTF-8"),
    "too deep": (b"[" * 100_000, "nested too deeply"),
    "a huge number": (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
    "an empty body": (b"", "JSON"),
    "no object": (b"[]", "expected an object, found a list of 0"),
    "no messages": ({"model": "agent"}, "messages"),
    "empty messages": ({"model": "agent", "messages": []}, "messages"),
    "messages are a text": ({"model": "agent", "messages": "hi"}, "messages"),
    "a message is a text": ({"messages": ["hi"]}, "messages[0]"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    "a content is a number": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image"),
    "n is a text": ({**QUESTION, "n": "two"}, "n: expected a whole number"),
    "n is 0": ({**QUESTION, "n": 0}, "n: expected at least 1"),
    "too many choices": ({**QUESTION, "n": 1000}, "128"),
    "temperature is a text": ({**QUESTION, "temperature": "hot"}, "temperature"),
    "max_tokens is negative": ({**QUESTION, "max_tokens": -1}, "max_tokens"),
    "stop is a number": ({**QUESTION, "stop": 3}, "stop"),
    "stream is a text": ({**QUESTION, "stream": "yes"}, "stream"),
    "a tool without a function": ({**QUESTION, "tools": [{"type": "function"}]}, "tools[0].function"),
    "a tool of OpenAI's": ({**QUESTION, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    "a tool's schema is a list": (
        {**QUESTION, "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "a tool's schema is of a text": (
        {**QUESTION, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    "tools are an object": ({**QUESTION, "tools": {}}, "tools"),
    "a tool choice is a number": ({**QUESTION, "tool_choice": 1}, "tool_choice"),
    "a model is a list": ({**QUESTION, "model": ["agent"]}, "model"),
    "a response format is a text": ({**QUESTION, "response_format": "json"}, "response_format"),
    "a logit bias is a list": ({**QUESTION, "logit_bias": [1]}, "logit_bias"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_refused_with_the_field_and_the_reason(name):
    body, message = BAD_BODIES[name]
    policy = ScriptedPolicy()
    response, error, _ = await ask(body, policy=policy)
    assert (response.status, error["error"]["type"]) == (400, "invalid_request_error"), error
    assert message in error["error"]["message"]
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-should-retry"] == "false"
    assert policy.requests == []


async def test_what_changes_no_token_is_accepted_and_told_once_in_a_run(caplog):
    ignored = list[str]()
    body = {**QUESTION, "provider": {"order": ["a"]}, "temprature": 1, "user": "u", "usage": {"include": True}}
    for _ in range(2):
        response, _, capture = await ask(body, ignored=ignored)
        assert response.status == 200
    assert (capture.refused_call, capture.ignored[-2:]) == (None, ["user", "usage"])
    (message,) = caplog.messages
    assert message == (
        'ignored in the agent\'s requests: provider, temprature (did you mean "temperature"?), user, usage'
    )


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        ("/v1/messages", [{"type": "web_search_20250305", "name": "web_search"}]),
        ("/v1/responses", [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}]),
    ],
)
async def test_tools_that_a_vendor_runs_are_dropped_and_named(path, tools, caplog):
    body = {"model": "agent", "max_tokens": 5, "tools": tools, "input": "hi", "messages": QUESTION["messages"]}
    body.pop("input" if "messages" in path else "messages")
    body.pop("max_tokens" if "responses" in path else "input", None)
    policy = ScriptedPolicy()
    response, _, _ = await ask(body, path, policy=policy)
    assert (response.status, policy.requests[0].tools) == (200, None)
    assert all(f"the tool {tool['type']}, which its vendor runs" in caplog.text for tool in tools)


IMAGE = [{"type": "text", "text": "what is it? "}, {"type": "image_url", "image_url": {"url": "data:,"}}]


async def test_a_note_stands_for_an_image_where_the_user_allows_it():
    policy = ScriptedPolicy()
    body = {"messages": [{"role": "user", "content": IMAGE}]}
    response, _, _ = await ask(body, policy=policy, omits_content=True)
    assert response.status == 200
    (message,) = policy.requests[0].messages
    assert message["content"] == "what is it? [image omitted]"


async def test_a_refused_call_is_told_to_the_episode_but_a_prompt_that_is_too_long_is_not():
    others = ({}, "/v1/embeddings"), (b"", "/v1/models", "GET")  # no model calls
    captures = [(await ask(*given))[2] for given in (({**QUESTION, "n": 0},), *others)]
    first = "/v1/chat/completions 400: n: expected at least 1, found 0"
    assert [capture.refused_call for capture in captures] == [first, None, None]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/agent", 405),
        ("POST", "/v1/moderations", 404),
        ("GET", "/v1/fine_tuning/jobs", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completionsx", 404),
    ],
)
async def test_other_paths_and_methods_are_refused(method, path, status):
    response, error, _ = await ask(QUESTION, path, method)
    assert response.status == status
    assert "chat/completions" in error["error"]["message"] or "/models/" in path


async def test_models_are_listed_by_entry_and_by_name():
    _, listed, _ = await ask(b"", "/v1/models", "GET")
    assert [each["id"] for each in listed["data"]] == ["agent", "scripted"]
    response, one, _ = await ask(b"", "/v1/models/scripted", "GET")
    assert (response.status, one["id"], one["object"]) == (200, "scripted", "model")


async def test_what_is_no_fault_of_the_request_is_no_400():
    for error, status in [(BackendError("odd"), 502), (EngineError("broken"), 500), (ConfigError("none yet"), 500)]:
        response, body, _ = await ask(QUESTION, policy=ScriptedPolicy(lambda request, error=error: error))
        assert (response.status, body["error"]["type"]) == (status, "server_error")
        assert str(error) in body["error"]["message"]


async def test_secrets_of_a_failure_are_not_told_to_the_agent():
    failure = BackendError("401 for Authorization: Bearer sk-proj-abcdefghijklmnopqrstuvwxyz0123456789")
    _, body, _ = await ask(QUESTION, policy=ScriptedPolicy(lambda request: failure))
    assert "abcdefghijklmnop" not in body["error"]["message"]


async def test_null_fields_are_absent_ones_and_an_absent_model_is_the_workflows():
    body = {"messages": QUESTION["messages"], "temperature": None, "tools": None, "stop": None, "stream": None}
    response, answer, _ = await ask(body)
    assert response.status == 200, answer
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}


async def test_a_response_continues_an_earlier_one_of_its_episode_by_its_id():
    policy = ScriptedPolicy(lambda request: f"reply {len(request.messages)}")
    endpoint, _ = endpoint_of(policy)

    async def respond(**body):
        content = json.dumps({"model": "gpt-5", **body}).encode()
        return json.loads((await endpoint.handle(EndpointRequest("POST", "/v1/responses", {}, content))).body)

    first = await respond(input="2 + 2?", instructions="Be brief.")
    second = await respond(input="and 3?", previous_response_id=first["id"])
    assert (first["model"], second["output"][0]["content"][0]["text"]) == ("gpt-5", "reply 3")
    assert [message["content"] for message in policy.requests[1].messages] == ["2 + 2?", "reply 2", "and 3?"]
    third = await respond(input="and 4?", previous_response_id=second["id"], store=False)
    assert len(policy.requests[2].messages) == 5
    for unknown in (third["id"], "resp_other"):
        failed = await respond(input="and 5?", previous_response_id=unknown)
        assert "this episode has no response" in failed["error"]["message"]


async def test_each_name_that_calls_accept_is_a_model():
    response, model, _ = await ask(b"", "/v1/models/gpt-5", "GET")
    assert (response.status, model["id"]) == (200, "gpt-5")


MESSAGES = "/v1/messages/count_tokens"


class CountingModel(PolicyModel):
    async def count_prompt(self, request):
        return sum(len(message["content"]) for message in request.messages) + len(request.tools or ())


class Embeddings(PolicyModel):
    is_policy = False
    model_name = "text-embedding"

    async def embed(self, body):
        return {"data": [{"embedding": [float(len(body["input"]))]}], "model": body["model"]}


async def ask_beside(body, path, *models):
    named = {"agent": PolicyModel(ScriptedPolicy())} | {f"vectors{number or ''}": m for number, m in enumerate(models)}
    capture = Capture(seed=1)
    endpoint = EpisodeEndpoint(
        lambda name: AsyncLLM(name, named[name], capture, SamplingParams()),
        "agent",
        {name: model.model_name for name, model in named.items()},
        capture,
        routes=LLMRoutes(embedders=[name for name in named if name != "agent"]),
    )
    response = await endpoint.handle(EndpointRequest("POST", path, {}, json.dumps(body).encode()))
    assert (capture.calls, capture.num_started, capture.refused_call) == ([], 0, None)
    return response.status, json.loads(response.body)


async def test_tokens_of_a_prompt_are_counted_without_a_call():
    body = {"model": "vectors", "system": "Be brief.", "messages": QUESTION["messages"]}
    assert await ask_beside(body, MESSAGES, CountingModel(ScriptedPolicy())) == (200, {"input_tokens": 15})
    status, answer = await ask_beside({**body, "model": "agent"}, MESSAGES)
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    assert "its tokens cannot be counted" in answer["error"]["message"]


async def test_embeddings_come_from_an_entry_that_has_them():
    body, own = {"model": "text-embedding", "input": "abc"}, Embeddings(ScriptedPolicy())
    for name in ("vectors", "text-embedding", "another"):
        status, answer = await ask_beside({**body, "model": name}, "/v1/embeddings", own)
        assert (status, answer["data"][0]["embedding"]) == (200, [3.0])
    status, answer = await ask_beside({**body, "model": "another"}, "/v1/embeddings", own, own)
    assert (status, "name one of vectors, vectors1 as the model" in answer["error"]["message"]) == (404, True)
    status, answer = await ask_beside(body, "/v1/embeddings")
    assert (status, "`_type: openai`: add one" in answer["error"]["message"]) == (404, True)
