"""Tool calls that a client formatted anew are given back as they were sampled; changed ones are not."""

import json

import pytest

from reinforge.rollout import history
from reinforge.rollout.capture import AsyncLLM
from reinforge.rollout.history import add_calls, restore_replies
from tests.calculator import TOOLS, CalculatorPolicy
from tests.doubles import PolicyModel
from tests.gateway import Episode

SAMPLED = '{"a": 2, "b": [1.0, "x"]}'


def message_of(arguments, content=None, **changes):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [{**call, **changes}]}


def own_calls(*replies):
    own = {}
    for reply in replies:
        add_calls(own, reply)
    return own


def restored(message, reply=None):
    question = {"role": "user", "content": "2 + 3?"}
    first, second = restore_replies([question, message], own_calls(reply or message_of(SAMPLED)))
    assert first is question
    return second


@pytest.mark.parametrize("arguments", ['{"a":2,"b":[1.0,"x"]}', '{ "b": [1.0, "x"], "a": 2 }', SAMPLED])
@pytest.mark.parametrize("content", [None, ""])
def test_the_same_values_have_the_text_that_was_sampled(arguments, content):
    assert restored(message_of(arguments, content)) == message_of(SAMPLED)


@pytest.mark.parametrize(
    "arguments", ['{"a": 3, "b": [1.0, "x"]}', '{"a": 2, "b": [1, "x"]}', '{"a": 2', "9" * 5000, {}]
)
def test_other_values_stay_the_agents(arguments):
    assert restored(message_of(arguments)) == message_of(arguments)


@pytest.mark.parametrize("change", [{"id": "c2"}, {"function": {"name": "multiply", "arguments": SAMPLED}}])
def test_other_calls_stay_the_agents(change):
    assert restored(message_of(SAMPLED, **change)) == message_of(SAMPLED, **change)


def test_text_that_the_agent_added_or_left_out_stays_so():
    assert restored(message_of('{"a":2,"b":[1.0,"x"]}', "added")) == message_of(SAMPLED, "added")
    assert restored(message_of('{"a":2,"b":[1.0,"x"]}'), message_of(SAMPLED, "thought")) == message_of(SAMPLED)


def test_without_tool_calls_the_messages_are_untouched():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}]
    assert restore_replies(messages, own_calls(message_of(SAMPLED))) is messages


def count_parsed(num_turns, monkeypatch):
    replies = [message_of(f'{{"a": {turn}}}', id=f"c{turn}") for turn in range(num_turns)]
    sent = [message_of(f'{{"a":{turn}}}', id=f"c{turn}") for turn in range(num_turns)]
    texts = []
    parse = history.load_json
    with monkeypatch.context() as patch:
        patch.setattr(history, "load_json", lambda text: texts.append(text) or parse(text))
        assert restore_replies(sent, own_calls(*replies)) == replies
    return len(texts)


def test_a_long_conversation_is_restored_in_linear_time(monkeypatch):
    assert [count_parsed(num_turns, monkeypatch) for num_turns in (10, 100)] == [20, 200]


def write_anew(message):
    """Returns a reply as PydanticAI sends it back: its JSON without spaces."""
    (call,) = message["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


async def count_conversations():
    """A question, a call, its result and the answer; returns how many conversations the episode looks like."""
    policy = CalculatorPolicy()
    episode = Episode(policy)
    create = AsyncLLM("agent", PolicyModel(policy), episode.capture, None).chat.completions.create
    messages = [{"role": "user", "content": "2 + 3?"}]
    reply = await create(messages=messages, tools=TOOLS)
    messages += [write_anew(dict(reply.choices[0].message)), {"role": "tool", "tool_call_id": "call_1", "content": "5"}]
    await create(messages=messages, tools=TOOLS)
    first, second = episode.capture.calls
    continues = second.request.messages[:2] == [*first.request.messages, first.reply.message]
    return 1 if continues else 2


async def test_a_conversation_with_json_written_anew_stays_one():
    assert await count_conversations() == 1


async def test_without_the_sampled_text_it_looks_like_two(monkeypatch):
    """Mutation check."""
    monkeypatch.setattr(history, "restore_replies", lambda messages, calls: messages)
    assert await count_conversations() == 2
