"""Tools that the client runs in forms of its own, and requests as programs that people ship send them."""

import json
from pathlib import Path

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from reinforge.dialects import anthropic, gemini, openai_chat, responses
from reinforge.dialects.chat_call import BadRequest
from reinforge.rollout.handle.arguments import read_arguments
from reinforge.rollout.handle.tool_arguments import read_tools
from tests.replies import completes, read_events

REQUESTS = Path(__file__).parents[2] / "data" / "requests"
FRAMEWORKS = ("agno", "autogen", "google_adk", "haystack", "llama_index", "strands")
OTHERS = dict.fromkeys(("opencode", "qwen_code", *FRAMEWORKS), openai_chat)
DIALECTS = {"claude_code": anthropic, "codex": responses, "gemini_cli": gemini, **OTHERS}
CODEX = {"client_metadata", "prompt_cache_key", "reasoning.summary"}
IGNORED = {"claude_code": {"metadata", "system[].cache_control"}, "codex": CODEX}
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {"type": "custom", "name": "note", "description": "Notes.", "format": {"type": "text"}},
    {"type": "local_shell"},
    {"type": "apply_patch"},
    {
        "type": "namespace",
        "name": "team",
        "description": "Others.",
        "tools": [{"type": "function", "name": "ask", "parameters": {}}],
    },
]


def read(**body):
    return responses.read_request({"model": "m", "input": "hi", "tools": TOOLS, **body})


@pytest.mark.parametrize("program", DIALECTS)
def test_requests_of_programs_are_read_whole(program):
    """Their shapes are recorded; their texts are ours."""
    for body in json.loads((REQUESTS / f"{program}.json").read_text()):
        call = DIALECTS[program].read_request(body)
        assert IGNORED.get(program, set()) >= {name for name in call.ignored if "cache_control" not in name}
        assert call.dropped == (("web_search",) if program == "codex" else ())
        num_calls = sum(len(message.get("tool_calls") or ()) for message in call.arguments["messages"])
        assert num_calls == sum(message["role"] == "tool" for message in call.arguments["messages"])
        names = [tool["function"]["name"] for tool in call.arguments.get("tools") or ()]
        assert ("multi_agent_v1__close_agent" in names) == (program == "codex")
        assert (names == ["lookup"] and num_calls == 1) == (program in FRAMEWORKS)


def test_each_kind_of_tool_is_a_function():
    functions = [tool["function"] for tool in read().arguments["tools"]]
    assert [function["name"] for function in functions] == ["note", "local_shell", "apply_patch", "team__ask"]
    assert functions[0] == {
        "name": "note", "description": "Notes.",
        "parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
    }  # fmt: skip


def test_allowed_tools_are_those_that_the_model_is_offered():
    chosen = [{"type": "custom", "name": "note"}, {"type": "apply_patch"}, {"type": "web_search"}]
    call = read(tool_choice={"type": "allowed_tools", "mode": "required", "tools": chosen})
    tools, mode = read_tools(read_arguments(call.arguments))
    assert ([tool["function"]["name"] for tool in tools], mode) == (["note", "apply_patch"], "required")
    with pytest.raises(BadRequest, match="tool_choice.type: only .* allowed_tools"):
        read(tool_choice={"type": "web_search"})


CALLS = [
    ("note", {"input": "a\n"}, {"type": "custom_tool_call", "name": "note", "input": "a\n"}),
    ("local_shell", {"command": ["ls"]}, {
        "type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}},
    }),
    ("apply_patch", {"type": "delete_file", "path": "a"}, {
        "type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"},
    }),
    ("team__ask", {}, {"type": "function_call", "namespace": "team", "name": "ask", "arguments": "{}"}),
    ("other", {}, {"type": "function_call", "name": "other", "arguments": "{}"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS)
def test_a_call_is_the_item_of_its_tool_and_comes_back_as_it_was_sampled(name, arguments, item):
    sampled = {"id": "c-0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    call = read(stream=True)
    completion = completes(None, tool_calls=[sampled], reason="tool_calls")
    answer = responses.write_answer(completion, call)
    (written,) = Response.model_validate(answer).to_dict()["output"]
    assert {key: written[key] for key in item} == item
    for event in read_events(responses.open_events(call).finish(completion)):
        assert EVENT.validate_python(event).type == event["type"]
    sent = [*answer["output"], {"type": f"{item['type']}_output", "call_id": "c-0", "output": "done"}]
    reply, result = read(input=sent).arguments["messages"]
    assert reply["tool_calls"][0]["function"]["name"] == name
    assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == json.loads(sampled["function"]["arguments"])
    assert result == {"role": "tool", "tool_call_id": "c-0", "content": "done"}


def test_what_is_no_argument_of_a_client_tool_is_passed_on_as_it_was_written():
    sampled = {"id": "c-0", "type": "function", "function": {"name": "note", "arguments": "[1"}}
    (item,) = responses.write_answer(completes(None, tool_calls=[sampled]), read())["output"]
    assert item["input"] == "[1"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command", "restart"}),
        (
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
            {"command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range"},
        ),
    ],
)
def test_tools_of_the_messages_api_that_the_client_runs_are_functions(tool, arguments):
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    (read_tool,) = anthropic.read_request(body).arguments["tools"]
    assert read_tool["function"]["name"] == tool["name"]
    assert set(read_tool["function"]["parameters"]["properties"]) == arguments


NOTED = [
    ({"type": "redacted_thinking", "data": "x"}, "[redacted_thinking]"),
    ({"type": "tool_reference", "tool_name": "grep"}, "[tool_reference: grep]"),
    ({"type": "compaction", "content": "They met."}, "They met."),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A page."}}, "A page."),
]


@pytest.mark.parametrize(("block", "text"), NOTED)
def test_blocks_without_a_form_of_their_own_stay_in_the_history_as_text(block, text):
    messages = [{"role": "user", "content": [block]}, {"role": "assistant", "content": [block]}]
    call = anthropic.read_request({"model": "m", "max_tokens": 5, "messages": messages})
    assert [message["content"] for message in call.arguments["messages"]] == [text, text]
