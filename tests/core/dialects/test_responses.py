"""OpenAI's Responses API."""

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from reinforge.dialects import responses
from reinforge.dialects.chat_call import BadRequest
from tests.replies import ADD, CALLING, REPLIES, SCHEMA, completes, read_events

EVENT = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}


def read(**body):
    return responses.read_request({"model": "m", "input": "2 + 2?", **body})


def test_a_text_and_instructions_are_two_messages():
    call = read(instructions="Be brief.", max_output_tokens=9, store=True, metadata={"a": "b"})
    assert call.arguments == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
        "max_completion_tokens": 9,
    }


def test_reasoning_text_and_calls_in_a_row_are_one_message_and_results_are_tool_messages():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]},
        *responses.write_answer(CALLING, read())["output"],
        {"type": "function_call_output", "call_id": "call-7-0", "output": "4"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    assert read(input=items).arguments["messages"] == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "Let me add.", "reasoning_content": "Hm, two.", "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "call-7-0", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_that_is_sent_back_is_the_message_that_was_sampled(reply):
    items = responses.write_answer(completes(**reply), read())["output"]
    (message,) = read(input=items).arguments["messages"]
    assert {**message, "content": message["content"] or ""} == {
        "role": "assistant", **reply, "content": reply["content"] or "",
    }  # fmt: skip


def test_two_replies_in_a_row_stay_two_messages():
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [each["content"] for each in read(input=items).arguments["messages"]] == ["a", "b"]


def test_tools_and_formats_take_the_form_of_chat_completions():
    call = read(
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
        reasoning={"effort": "low"},
        include=["message.output_text.logprobs"],
    )
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
    assert call.arguments | {"messages": None} == {
        "messages": None,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        "reasoning_effort": "low",
        "logprobs": True,
    }


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"previous_response_id": "r"}, "send the whole conversation in input"),
        ({"conversation": "c"}, "conversation: conversations are not stored"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: this field is required"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, r"tools\[0\].parameters.type"),
        ({"tools": [{**TOOL, "parameters": 3}]}, r"tools\[0\].parameters: expected an object, found 3"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, r"input\[0\].type: items are not stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "takes text only"),
        ({"input": [3]}, r"input\[0\]: expected an object, found 3"),
        ({"input": None}, "input"),
        ({"input": {}}, "input: expected a string or a list of items"),
        ({"model": None}, "model: this field is required"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(body, named):
    with pytest.raises(BadRequest, match=named):
        read(**body)


def test_the_answer_is_a_response_of_the_official_client():
    answer = responses.write_answer(CALLING, read(tools=[TOOL], include=["message.output_text.logprobs"]))
    parsed = Response.model_validate(answer)
    assert parsed.output_text == "Let me add."
    assert parsed.status == "completed"
    assert parsed.usage.total_tokens == 5
    reasoning, message, call = parsed.output
    assert [each.type for each in parsed.output] == ["reasoning", "message", "function_call"]
    assert reasoning.content[0].text == "Hm, two."
    assert call.call_id == "call-7-0"
    assert call.arguments == '{"a": 2}'
    assert [each.logprob for each in message.content[0].logprobs] == [-0.5, -0.25]


def test_a_reply_that_is_cut_is_incomplete():
    parsed = Response.model_validate(responses.write_answer(completes(reason="length"), read()))
    assert parsed.status == "incomplete"
    assert parsed.incomplete_details.reason == "max_output_tokens"


def test_every_event_is_one_of_the_official_clients_and_the_deltas_join_to_the_response():
    events = read_events(responses.open_events(read(stream=True)).finish(CALLING))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    kinds = list(dict.fromkeys(event["type"] for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_text.delta", "response.output_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed",
    ]  # fmt: skip
    joined = {kind: "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta") for kind in (
        "reasoning_text", "output_text", "function_call_arguments")}  # fmt: skip
    assert joined == {
        "reasoning_text": "Hm, two.", "output_text": "Let me add.", "function_call_arguments": '{"a": 2}',
    }  # fmt: skip
    assert events[-1]["response"] == responses.write_answer(CALLING, read(stream=True))
