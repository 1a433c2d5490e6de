"""Parsing the tool calls of model families, and leaving other text alone."""

import json

import pytest

from reinforge.dialects.tool_calls import ToolFormat, detect_tool_format, parse_tool_calls

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


def test_hermes_parses_a_call_that_the_end_token_cut_off():
    assert calls('<tool_call>{"name": "f", "arguments": {}}', HERMES) == (None, [("c-0", "f", {})])


def test_llama3_parses_plain_json_the_python_tag_and_several_calls():
    assert calls('{"name": "add", "parameters": {"a": 1}}', LLAMA3) == (None, [("c-0", "add", {"a": 1})])
    assert calls('<|python_tag|>{"name": "f", "parameters": {}}', LLAMA3) == (None, [("c-0", "f", {})])
    two = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "y"}}'
    assert calls(two, LLAMA3) == (None, [("c-0", "f", {}), ("c-1", "g", {"x": "y"})])


@pytest.mark.parametrize(
    ("text", "tool_format"),
    [
        ("just words", HERMES),
        ("just words", LLAMA3),
        ("<tool_call>{not json}</tool_call>", HERMES),
        ('<tool_call>{"name": 3}</tool_call>', HERMES),
        ('{"name": "f", "parameters": [1]}', LLAMA3),
        ('{"answer": 42}', LLAMA3),
        ('{"name": "f", "parameters": {}} and so on', LLAMA3),
        ("", HERMES),
        ("", LLAMA3),
    ],
)
def test_text_that_cannot_be_parsed_stays_text(text, tool_format):
    assert calls(text, tool_format) == (text, [])


def test_the_other_familys_key_is_accepted():
    assert calls('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', HERMES)[1] == [("c-0", "f", {"a": 1})]


def test_the_chat_template_identifies_the_family():
    assert detect_tool_format("{% if tools %}<tool_call>...") is HERMES
    assert detect_tool_format('{% if tools %}{"name": ..., "parameters": ...}') is LLAMA3
    assert detect_tool_format("{{ messages }}") is None
