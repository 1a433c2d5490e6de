"""The reply that an agent gets: OpenAI's attributes and methods, dict access, and no way back into the record."""

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from reinforge.rollout.handle.chat import normalize_message
from reinforge.rollout.handle.completion import build_completion
from reinforge.types.request import ModelReply
from tests.core.rollout.test_handle import CALL, handle

MESSAGE = {"role": "assistant", "content": None, "tool_calls": [CALL]}


async def reply_to(*messages, llm=None):
    llm = llm or handle(MESSAGE)[0]
    return await llm.chat.completions.create(messages=list(messages) or [{"role": "user", "content": "go"}])


async def test_a_tool_call_is_read_as_in_openais_client_and_as_a_dict():
    reply = await reply_to()
    (call,) = reply.choices[0].message.tool_calls
    assert (call.id, call.type, call.function.name, json.loads(call.function.arguments)) == (
        "c1", "function", "add", {"a": 1},
    )  # fmt: skip
    assert (call["id"], call["function"]["name"], call.get("index")) == ("c1", "add", None)
    assert call == CALL
    assert json.loads(json.dumps(call)) == CALL


async def test_a_completion_has_the_fields_of_openais():
    reply = await reply_to()
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.finish_reason, choice.index) == (
        "chat.completion", "m", "tool_calls", 0,
    )  # fmt: skip
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (2, 2, 4)
    assert reply.usage.completion_tokens_details is None
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", None, None)
    assert choice.logprobs.content[0].logprob == -0.5
    assert reply.system_fingerprint is None
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_without_tool_calls_they_read_as_none_and_are_no_entry():
    reply = await reply_to(llm=handle({"role": "assistant", "content": "hi"})[0])
    message = reply.choices[0].message
    assert message.tool_calls is None
    assert message == {"role": "assistant", "content": "hi"}
    assert json.dumps(message) == '{"role": "assistant", "content": "hi"}'


async def test_a_wrong_attribute_is_an_attribute_error_with_the_nearest_one():
    message = (await reply_to()).choices[0].message
    with pytest.raises(AttributeError, match=r"'ChatMessage' object has no attribute 'tool_call', did you mean"):
        _ = message.tool_call
    assert not hasattr(message, "parsed")


async def test_model_dump_gives_plain_data_with_every_field_of_openais():
    reply = await reply_to()
    dumped = reply.choices[0].message.model_dump()
    assert dumped == {
        **MESSAGE, "refusal": None, "annotations": None, "audio": None, "function_call": None,
    }  # fmt: skip
    assert type(dumped["tool_calls"][0]["function"]) is dict
    assert reply.choices[0].message.model_dump(exclude_none=True) == {"role": "assistant", "tool_calls": [CALL]}
    assert reply.choices[0].message.to_dict() == MESSAGE
    assert reply.choices[0].message.model_dump(include={"role"}) == {"role": "assistant"}
    assert json.loads(reply.model_dump_json(exclude_none=True)) == {
        "id": reply.id, "created": reply.created, "model": "m", "object": "chat.completion",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "choices": [
            {
                "index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [CALL]},
                "logprobs": {
                    "content": [
                        {"token": "4", "bytes": [52], "logprob": -0.5, "top_logprobs": []},
                        {"token": "2", "bytes": [50], "logprob": -0.25, "top_logprobs": []},
                    ],
                },
            }
        ],
    }  # fmt: skip
    assert reply.choices[0].message.model_dump_json() == json.dumps(
        reply.choices[0].message.model_dump(), separators=(",", ":")
    )


async def test_copies_and_pickles_are_the_same_objects():
    reply = await reply_to()
    for copied in (copy.deepcopy(reply), copy.copy(reply), pickle.loads(pickle.dumps(reply)), reply.model_copy()):
        assert copied == reply
        assert copied.choices[0].message.tool_calls[0].function.name == "add"
    assert reply.model_copy(update={"model": "other"}).model == "other"


class SdkFunction(BaseModel):
    name: str
    arguments: str


class SdkCall(BaseModel):
    id: str
    type: str
    function: SdkFunction


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


@pytest.mark.parametrize(
    "pass_back",
    [
        lambda message: message,
        lambda message: message.model_dump(),
        lambda message: message.to_dict(),
        lambda message: dict(message),
        lambda message: {"role": "assistant", "content": message.content, "tool_calls": message.tool_calls},
        lambda message: {"role": "assistant", "content": None, "tool_calls": [message.tool_calls[0].model_dump()]},
        lambda message: {
            "role": "assistant", "content": None, "tool_calls": [SdkCall.model_validate(dict(message.tool_calls[0]))],
        },
        lambda message: json.loads(json.dumps(message)),
    ],
    ids=["message", "model_dump", "to_dict", "dict", "calls", "dumped calls", "pydantic", "json"],
)  # fmt: skip
async def test_however_a_message_is_passed_back_the_request_holds_the_same_plain_data(pass_back):
    llm, _, model = handle(MESSAGE, {"role": "assistant", "content": "3"})
    asked = {"role": "user", "content": "go"}
    message = (await reply_to(asked, llm=llm)).choices[0].message
    await reply_to(asked, pass_back(message), RESULT, llm=llm)
    assert model.requests[1].messages == [asked, MESSAGE, RESULT]
    assert type(model.requests[1].messages[1]["tool_calls"][0]["function"]) is dict


async def test_an_agent_that_changes_its_reply_does_not_change_the_record():
    llm, capture, _ = handle(MESSAGE)
    message = (await reply_to(llm=llm)).choices[0].message
    message.content = "rewritten"
    message.tool_calls[0].function.name = "other"
    message.tool_calls.clear()
    assert capture.calls[0].reply.message == MESSAGE


def test_calls_of_another_services_kind_are_kept():
    custom = {"id": "c2", "type": "custom", "custom": {"name": "grep", "input": "x"}}
    reply = ModelReply({"role": "assistant", "content": None, "tool_calls": [custom]}, "tool_calls", None)
    call = SimpleNamespace(call_id="i", model="m", started_s=0.0, choices=[reply], reply=reply, num_completion_tokens=0)
    (built,) = build_completion(call).choices[0].message.tool_calls
    assert built == custom
    assert built.custom["name"] == "grep"


def test_content_blocks_are_kept_and_empty_fields_are_not():
    blocks = [{"type": "text", "text": "hi"}]
    assert normalize_message({"role": "user", "content": blocks, "name": None}) == {"role": "user", "content": blocks}
    assert normalize_message({"role": "assistant", "content": None}) == {"role": "assistant", "content": None}
