"""The gateway in front of a model behind an endpoint: the tokens that it returns are recorded, and none are made up."""

import json

import pytest
from aiohttp import web

from reinforge.protocols.hosted_policy import HostedPolicy
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.episode import build_trajectory
from reinforge.rollout.gateway import Gateway
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from reinforge.rollout.models.openai_client import OpenAIChat, OpenAILLMConfig
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.request import ChatPrompt
from tests.doubles import PolicyModel, examples
from tests.gateway import CHAT, ask
from tests.openai_server import OpenAIServer, fails, says

TOKENS = [{"token": "fo", "logprob": -0.5, "top_logprobs": []}, {"token": "ur", "logprob": -0.25, "top_logprobs": []}]


def returns_tokens(request, body):
    if not body.get("return_token_ids"):
        return says("four")(request, body)
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "four"},
        "logprobs": {"content": TOKENS},
        "token_ids": [8, 9],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    answer = {"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}
    return web.json_response({**answer, "prompt_token_ids": [1, 2, 3]})


async def call(step, body=CHAT, *, is_policy=False, path="/chat/completions", **settings):
    """Makes one call through the gateway; returns status and body of the response, the record, and the server."""
    async with OpenAIServer(step) as server:
        config = OpenAILLMConfig(model_name="served", base_url=server.url, **settings)
        chat, capture = OpenAIChat(config, server.url), Capture(seed=7)
        try:
            llm = AsyncLLM("agent", PolicyModel(HostedPolicy(chat, "served")) if is_policy else chat, capture, None)
            endpoint = EpisodeEndpoint(lambda name: llm, "agent", {"agent": "served"}, capture)
            async with Gateway() as gateway:
                with gateway.attach(endpoint) as access:
                    status, _, content = await ask(access, body, path=path)
        finally:
            await chat.close()
    record = EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0])
    record.calls = capture.calls
    return status, json.loads(content), record, server


VLLM = {"extra_body": {"return_token_ids": True}, "logprobs": True}


async def test_token_ids_and_log_probs_of_the_endpoint_are_recorded_and_returned():
    status, answer, record, server = await call(
        returns_tokens, {**CHAT, "return_token_ids": True, "logprobs": True, "top_k": 4}, **VLLM
    )
    assert status == 200, answer
    assert server.bodies[0]["return_token_ids"] is True
    assert server.bodies[0]["top_k"] == 4
    (choice,) = answer["choices"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [8, 9])
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.5, -0.25]
    assert record.calls[0].reply.logprobs == {"content": TOKENS, "token_ids": [8, 9], "prompt_token_ids": [1, 2, 3]}


async def test_a_hosted_policy_is_trained_on_messages_with_the_tokens_that_it_returned():
    _, _, record, _ = await call(returns_tokens, is_policy=True, **VLLM)
    (recorded,) = record.calls
    assert isinstance(recorded.training_source, ChatPrompt)
    turn = build_trajectory(record, 1.0, [True]).episode[-1]
    assert turn.logprobs.token_ids == [8, 9]
    assert turn.is_recorded


async def test_a_hosted_policy_that_returns_no_tokens_is_trained_on_messages():
    _, answer, record, _ = await call(says("four"), {**CHAT, "return_token_ids": True}, is_policy=True)
    assert "token_ids" not in answer["choices"][0]
    (recorded,) = record.calls
    assert recorded.reply.tokens is None
    assert isinstance(recorded.training_source, ChatPrompt)
    assert recorded.training_source.messages == tuple(CHAT["messages"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"model": "agent", "input": "2 + 2?"}),
        ("/messages", {"model": "agent", "max_tokens": 9, "messages": CHAT["messages"]}),
    ],
)
async def test_the_other_apis_reach_an_endpoint_of_chat_completions_too(path, body):
    status, answer, record, server = await call(returns_tokens, body, path=path, **VLLM)
    assert status == 200, answer
    assert server.bodies[0]["messages"] == CHAT["messages"]
    assert record.calls[0].reply.logprobs["token_ids"] == [8, 9]


async def test_a_broken_endpoint_is_told_to_the_client_and_recorded_nowhere():
    status, answer, record, _ = await call(fails(404), max_retries=0)
    assert status == 502
    assert "broken 404" in answer["error"]["message"]
    assert record.calls == []
