"""Parsing the tool calls of model families, and leaving other text alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reinforge.bounded import decode_json
from reinforge.dialects.tool_calls import (
    ParsedReply,
    ToolFormat,
    find_bad_call,
    parse_tool_calls,
    read_tool_calls,
)

HERMES, LLAMA3 = ToolFormat.HERMES, ToolFormat.LLAMA3


def calls(text, tool_format):
    message = parse_tool_calls(text, tool_format, "c")
    parsed = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]
    return message["content"], parsed


def test_hermes_parses_one_or_several_calls_and_keeps_the_text():
    add, look = '{"name": "add", "arguments": {"a": 1}}', '{"name": "look"}'
    text = f"Let me see.\n<tool_call>\n{add}\n</tool_call>\n<tool_call>{look}</tool_call>"
    assert calls(text, HERMES) == ("Let me see.", [("c-0", "add", {"a": 1}), ("c-1", "look", {})])


def test_llama3_parses_plain_json_the_python_tag_and_several_calls():
    assert calls('{"name": "add", "parameters": {"a": 1}}', LLAMA3) == (None, [("c-0", "add", {"a": 1})])
    assert calls('<|python_tag|>{"name": "f", "parameters": {}}', LLAMA3) == (None, [("c-0", "f", {})])
    two = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "y"}}'
    assert calls(two, LLAMA3) == (None, [("c-0", "f", {}), ("c-1", "g", {"x": "y"})])


@pytest.mark.parametrize(
    ("text", "tool_format"),
    [
        ("<tool_call>{not json}</tool_call>", HERMES),
        ('<tool_call>{"name": 3}</tool_call>', HERMES),
        ('{"name": "f", "parameters": [1]}', LLAMA3),
        ('{"answer": 42}', LLAMA3),
        ('{"name": "f", "parameters": {}} and so on', LLAMA3),
    ],
)
def test_text_that_cannot_be_parsed_stays_text(text, tool_format):
    assert calls(text, tool_format) == (text, [])


def test_the_other_familys_key_is_accepted():
    assert calls('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', HERMES)[1] == [("c-0", "f", {"a": 1})]


BAD_ARGUMENTS = {
    "deep": '{"a": ' + "[" * 2000 + "]" * 2000 + "}",
    "digits": '{"a": ' + "7" * 5000 + "}",
    "infinite": '{"a": 1e400}',
    "not a number": '{"a": NaN}',
    "surrogate": r'{"a": "\ud800"}',
    "twice": '{"a": 1, "a": 2}',
    "huge": '{"a": "' + "x" * (1 << 20) + '"}',
    "list": "[1]",
    "broken": '{"a": }',
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_of_a_hosted_policy_are_found(name):
    function = {"name": "f", "arguments": BAD_ARGUMENTS[name]}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    assert find_bad_call(message).startswith("the model wrote arguments of the tool 'f' that cannot be parsed: ")


def test_arguments_that_can_be_parsed_are_not_bad():
    for arguments in ('{"a": 1}', "", "  ", None):
        message = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
        assert find_bad_call(message) is None
    assert find_bad_call({"role": "assistant", "content": "yes"}) is None
    assert find_bad_call({"tool_calls": [{"id": "c", "custom": {"name": "f", "input": "{"}}]}) is None


def test_text_and_answers_in_json_are_no_failed_calls():
    for text in ("just words", '{"answer": 42}', '{"answer": ', "{not json}", "", "[1, 2"):
        assert read_tool_calls(text, LLAMA3) == read_tool_calls(text, HERMES) == ParsedReply(text)


PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>",
    '{"name": "f", ', '"arguments": ', "{", "}", "[", '"', "\\ud800", ";",
]  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from(PARTS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
REPLIES = st.lists(TEXTS | VALUES.map(json.dumps), max_size=12).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=REPLIES, tool_format=st.sampled_from(ToolFormat))
def test_any_reply_is_text_or_calls_that_can_be_written_and_read_again(text, tool_format):
    parsed = read_tool_calls(text, tool_format)
    if not parsed.calls:
        assert parsed.content == text
    message = parsed.build_message("c")
    for call in message.get("tool_calls", []):
        call["function"]["arguments"].encode()
        call["function"]["name"].encode()
        assert isinstance(decode_json(call["function"]["arguments"]), dict)
    assert find_bad_call(message) is None


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=3), tool_format=st.sampled_from([HERMES, LLAMA3])
)
def test_a_call_that_a_model_wrote_correctly_is_read_as_it_was_written(arguments, tool_format):
    call = json.dumps({"name": "f", "arguments": arguments})
    text = f"<tool_call>\n{call}\n</tool_call>" if tool_format is HERMES else call
    parsed = read_tool_calls(text, tool_format)
    if parsed.failure is None:
        assert json.dumps(parsed.calls) == json.dumps([("f", arguments)])
    else:
        assert "NaN" in call or "Infinity" in call or "lone surrogate" in parsed.failure
