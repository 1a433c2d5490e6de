"""Anthropic's Messages API."""

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from reinforge.dialects import anthropic
from reinforge.dialects.chat_call import BadRequest
from tests.replies import ADD, CALLING, REPLIES, SCHEMA, completes, read_events

EVENT = TypeAdapter(RawMessageStreamEvent)
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
ASK = {"role": "user", "content": "2 + 2?"}


def read(**body):
    return anthropic.read_request({"model": "m", "max_tokens": 9, "messages": [ASK], **body})


def test_system_and_messages_become_messages():
    call = read(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["\n"],
        top_k=5,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert call.arguments == {
        "messages": [{"role": "system", "content": "Be brief."}, ASK],
        "max_tokens": 9,
        "stop": ["\n"],
        "extra_body": {"top_k": 5, "chat_template_kwargs": {"enable_thinking": True}},
    }


def test_a_prefill_is_a_message_as_in_chat():
    prefill = {"role": "assistant", "content": "The sum is"}
    assert read(messages=[ASK, prefill], thinking={"type": "adaptive"}).arguments == {
        "messages": [ASK, prefill], "max_tokens": 9,
    }  # fmt: skip


def test_blocks_of_a_reply_are_one_message_and_results_are_tool_messages():
    blocks = anthropic.write_answer(CALLING, read())["content"]
    results = [
        {"type": "tool_result", "tool_use_id": "call-7-0", "content": [{"type": "text", "text": "4"}]},
        {"type": "text", "text": "Go on."},
    ]
    turns = [ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    assert read(messages=turns).arguments["messages"] == [
        ASK,
        {"role": "assistant", "content": "Let me add.", "reasoning_content": "Hm, two.", "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "call-7-0", "content": "4"},
        {"role": "user", "content": "Go on."},
    ]


CUT, ESCAPED = (
    {"content": None, "tool_calls": [{**ADD, "function": {"name": "add", "arguments": arguments}}]}
    for arguments in ('{"a": ', '{"ü": ["\\n"]}')
)


@pytest.mark.parametrize("reply", [*REPLIES, CUT, ESCAPED])
def test_a_reply_that_is_sent_back_is_the_message_that_was_sampled(reply):
    blocks = anthropic.write_answer(completes(**reply), read())["content"]
    message = read(messages=[{"role": "assistant", "content": blocks}, ASK]).arguments["messages"][0]
    assert {**message, "content": message["content"] or ""} == {
        "role": "assistant", **reply, "content": reply["content"] or "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ],
)
def test_tools_take_the_form_of_chat_completions(choice, expected):
    arguments = read(tools=[TOOL], tool_choice=choice).arguments
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert arguments == {
        "messages": [ASK], "max_tokens": 9, "tools": [{"type": "function", "function": function}], **expected,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens: this field is required"),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": [{"role": "tool", "content": "4"}]}, r"messages\[0\].role: expected one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": [3]}]}, r"messages\[0\].content\[0\]: expected an object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"tools": [{"type": "painter_20270101", "name": "p"}]}, r"tools\[0\].type: tools of the type .* are unknown"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "would delete a part"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "would delete a part"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema: this field is required"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": "high"}, 'temperature: expected a number, found "high"'),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(body, named):
    with pytest.raises(BadRequest, match=named):
        read(**body)


def test_the_answer_is_a_message_of_the_official_client():
    parsed = Message.model_validate(anthropic.write_answer(CALLING, read(tools=[TOOL])))
    assert [block.type for block in parsed.content] == ["thinking", "text", "tool_use"]
    assert parsed.content[2].input == {"a": 2}
    assert parsed.stop_reason == "tool_use"
    assert (parsed.usage.input_tokens, parsed.usage.output_tokens) == (3, 2)


@pytest.mark.parametrize(
    ("completion", "stops", "expected"),
    [
        (completes(), [], ("end_turn", None)),
        (completes(reason="length"), [], ("max_tokens", None)),
        (completes("Let me "), ["add."], ("stop_sequence", "add.")),
        (completes(), ["never"], ("end_turn", None)),
    ],
)
def test_the_reason_why_a_reply_ended(completion, stops, expected):
    answer = anthropic.write_answer(completion, read(stop_sequences=stops))
    assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_every_event_is_one_of_the_official_clients_and_the_deltas_join_to_the_message():
    events = read_events(anthropic.open_events(read(stream=True)).finish(CALLING))
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    joined = {}
    for event in events:
        if event["type"] == "content_block_delta":
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            joined[event["index"]] = joined.get(event["index"], "") + text
    assert joined == {0: "Hm, two.", 1: "Let me add.", 2: '{"a": 2}'}


def test_an_error_has_the_form_of_anthropic():
    assert anthropic.write_error(BadRequest("no", status=404)) == {
        "type": "error", "error": {"type": "not_found_error", "message": "no"},
    }  # fmt: skip
