"""Messages from the steps of an episode, ours and those of another framework."""

from types import SimpleNamespace

import pytest

from reinforge.finetuning import IntermediateStep, IntermediateStepPayload, parse_to_openai_messages
from reinforge.types.steps import TraceMetadata
from tests.replies import assistant, user


def step(event, *, name="m", id_="1", metadata=None, **data):
    payload = IntermediateStepPayload(event_type=event, name=name, UUID=id_, data=data, metadata=metadata)
    node = {"function_id": "f", "function_name": "f"}
    return IntermediateStep(parent_id="root", function_ancestry=node, payload=payload)


def call(prompt, answer, id_="1", logprobs=None):
    reply = {"message": {"role": "assistant", "content": answer}, "logprobs": logprobs}
    payload = SimpleNamespace(choices=[reply])
    return [step("LLM_START", id_=id_, input=prompt), step("LLM_END", id_=id_, input=prompt, payload=payload)]


SYSTEM = {"role": "system", "content": "s"}


def test_a_conversation_is_written_once():
    first = [SYSTEM, user("a")]
    steps = call(first, "A") + call([*first, assistant("A"), user("b")], "B", "2")
    assert parse_to_openai_messages(steps) == [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B")]


def test_a_message_that_the_agent_repeats_stays():
    """NAT core 12: deduplicated by role and content, the second "next" vanished and the episode was refused."""
    first = [user("next")]
    steps = call(first, "A") + call([*first, assistant("A"), user("next")], "B", "2")
    assert [message["content"] for message in parse_to_openai_messages(steps)] == ["next", "A", "next", "B"]


def test_an_agent_that_starts_each_turn_anew():
    steps = call([SYSTEM, user("a")], "A") + call([SYSTEM, user("b")], "B", "2")
    assert parse_to_openai_messages(steps) == [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B")]


def test_a_reminder_after_a_tool_result_stays():
    """NAT core 13: the prompt after a tool's result was skipped whole."""
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}
    result = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    start = [user("a")]
    first = [step("LLM_START", input=start), step("LLM_END", input=start, payload={"message": asked})]
    tool = step("TOOL_END", name="calculator", id_="t", output="42")
    second = call([*start, asked, result, user("be brief")], "B", "2")
    found = parse_to_openai_messages([*first, tool, *second])
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user", "assistant"]
    assert found[1]["tool_calls"] == [{"id": "c1"}]
    assert found[2]["tool_call_id"] == "c1"
    assert found[3]["content"] == "be brief"


def test_a_tool_result_that_no_prompt_repeats_is_kept():
    tool = step("TOOL_END", name="calculator", id_="t", output="42")
    found = parse_to_openai_messages([*call([user("a")], "A"), tool])
    assert found[-1] == {"role": "tool", "content": "42", "name": "calculator"}


def test_two_agents_are_no_error():
    """NAT core 14: a second system prompt, or two user messages in a row, raised."""
    steps = call([SYSTEM, user("a"), user("b")], "A") + call([{"role": "system", "content": "t"}, user("c")], "C", "2")
    roles = [message["role"] for message in parse_to_openai_messages(steps)]
    assert roles == ["system", "user", "user", "assistant", "system", "user", "assistant"]


def test_content_blocks_and_missing_content():
    """NAT core 15: blocks raised TypeError, a payload without a message KeyError."""
    blocks = [{"type": "text", "text": "a"}]
    start = step("LLM_START", input=[{"role": "user", "content": blocks}])
    end = step("LLM_END", output="A", payload=object())
    assert parse_to_openai_messages([start, end]) == [{"role": "user", "content": blocks}, assistant("A")]


def test_log_probs_and_the_choice_that_the_agent_used():
    payload = SimpleNamespace(
        choices=[{"message": assistant("first"), "logprobs": "p0"}, {"message": assistant("second"), "logprobs": "p1"}]
    )
    end = step("LLM_END", input="a", payload=payload, metadata={"choice": 1})
    assert parse_to_openai_messages([end]) == [user("a"), {**assistant("second"), "logprobs": "p1"}]


def test_what_is_no_message_is_named():
    with pytest.raises(ValueError, match=r"step 1 \(LLM_START\): int is not a message, it has no role"):
        parse_to_openai_messages([step("LLM_START", input=[3])])


def test_the_prompt_of_a_framework_is_its_whole_list_of_messages():
    """The toolkit's callbacks put the last message's text into `input`: the system prompt and the history vanished."""
    prompt = [SYSTEM, user("a"), assistant("A"), user("b")]
    for place in ({"payload": prompt}, {"metadata": TraceMetadata(chat_inputs=prompt)}):
        steps = [step("LLM_START", input="b", **place), step("LLM_END", input="b", output="B")]
        assert parse_to_openai_messages(steps) == [*prompt, assistant("B")]


def test_tool_calls_of_langchain_are_written_in_openais_form():
    call = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
    wanted = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    reply = SimpleNamespace(type="AIMessageChunk", content="", tool_calls=[call], response_metadata={})
    end = step("LLM_END", input="go", payload=SimpleNamespace(message=reply))
    assert parse_to_openai_messages([end])[1] == {**assistant(""), "tool_calls": [wanted]}
    raw = {**wanted, "function": {"name": "add", "arguments": '{"a":1}'}}
    reply.additional_kwargs = {"tool_calls": [raw]}
    assert parse_to_openai_messages([end])[1]["tool_calls"] == [raw], "as it was sampled"


def test_the_messages_of_an_installed_langchain():
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.outputs import ChatGeneration

    call = {"name": "add", "args": {"a": 1}, "id": "c1"}
    reply = AIMessage("", tool_calls=[call], response_metadata={"logprobs": {"content": [1]}})
    prompt = [SystemMessage("s"), HumanMessage("a")]
    later = [*prompt, reply, ToolMessage("2", tool_call_id="c1")]
    steps = [
        step("LLM_START", input="a", payload=prompt),
        step("LLM_END", input="a", payload=ChatGeneration(message=reply)),
        step("TOOL_END", name="add", id_="t", output=later[-1]),
        step("LLM_START", id_="2", input="2", payload=later),
        step("LLM_END", id_="2", input="2", payload=ChatGeneration(message=AIMessage("two"))),
    ]
    found = parse_to_openai_messages(steps)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (found[2]["logprobs"], found[3]["tool_call_id"]) == ({"content": [1]}, "c1")
