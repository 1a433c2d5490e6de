"""OpenAI's Responses API (`/v1/responses`), whose items become the messages of a chat, and back.

    instructions "Be brief."                            {"role": "system", "content": "Be brief."}
    {"role": "user", "content": "2 + 2?"}               {"role": "user", "content": "2 + 2?"}
    reasoning "Hm.", message "Let me add.",             {"role": "assistant", "reasoning_content": "Hm.",
      function_call add {"a": 2}              <->        "content": "Let me add.", "tool_calls": [add {"a": 2}]}
    function_call_output "4"                            {"role": "tool", "tool_call_id": ..., "content": "4"}

Nothing is stored: the client sends the whole conversation with each call, which is also what a turn is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import ChatCall, ReplyHead
from reinforge.dialects.fields import Fields, keep_given, read_schema
from reinforge.dialects.response_events import ResponseEvents
from reinforge.dialects.response_input import read_input
from reinforge.dialects.response_output import build_response

_READ = {"model", "input", "instructions", "tools", "tool_choice", "text", "temperature", "top_p", "top_logprobs",
         "max_output_tokens", "parallel_tool_calls", "reasoning", "include", "stream", "metadata"}  # fmt: skip
_IGNORED = {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "prompt_cache_options", "stream_options", "max_tool_calls", "truncation"}  # fmt: skip
_WHOLE = "send the whole conversation in input, as a client does that stores nothing"
_REFUSED = {
    "previous_response_id": f"responses are not stored; {_WHOLE}",
    "conversation": f"conversations are not stored; {_WHOLE}",
    "background": "a response is answered at once; leave it out",
    "prompt": "there are no stored prompts; send instructions and input",
    "context_management": "the conversation is used as it is sent; leave it out",
    "moderation": "there is no moderation; leave it out",
}
_INCLUDED = {"message.output_text.logprobs", "reasoning.encrypted_content"}
_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict", "defer_loading"}


def read_request(body: Mapping[str, Any]) -> ChatCall:
    """Returns the call that a body asks for.

    Raises:
        BadRequest: A field is wrong, or asks for something that no reply can honour.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    fields.check_names(_READ | _IGNORED | set(_REFUSED))
    if fields.choice("truncation", ("auto", "disabled")) == "auto":
        raise fields.bad("truncation", "no message is dropped here; leave it out, or shorten the conversation yourself")
    include = _read_include(fields)
    instructions = fields.text("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += read_input(fields)
    if not messages:
        raise fields.bad("input", "expected a text or items, found neither")
    with_logprobs = "message.output_text.logprobs" in include
    tools = [_read_tool(each) for each in fields.objects("tools")]
    arguments = keep_given(
        messages=messages,
        tools=tools or None,
        tool_choice=_read_tool_choice(fields) if tools else None,
        parallel_tool_calls=fields.flag("parallel_tool_calls") if tools else None,
        response_format=_read_format(fields),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        max_completion_tokens=fields.integer("max_output_tokens", least=1),
        reasoning_effort=_read_effort(fields),
        logprobs=with_logprobs or None,
        top_logprobs=(fields.integer("top_logprobs", least=0) or None) if with_logprobs else None,
    )
    options = {"body": dict(body), "logprobs": with_logprobs}
    model = fields.require("model", fields.text("model"))
    return ChatCall(arguments, model, stream=bool(fields.flag("stream")), options=options)


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    return build_response(completion, call)


def write_events(completion: Mapping[str, Any], call: ChatCall) -> Iterator[bytes]:
    return ResponseEvents(call).finish(completion)


def open_events(call: ChatCall, head: ReplyHead) -> ResponseEvents:
    return ResponseEvents(call, head)


def _read_include(fields: Fields) -> list[str]:
    include = fields.items("include") or []
    for each in include:
        if each not in _INCLUDED:
            raise fields.bad("include", f"{each!r} is not known here; allowed: {', '.join(sorted(_INCLUDED))}")
    return include


def _read_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.require("type", tool.text("type"))
    if kind != "function":
        message = f'expected "function", found "{kind[:40]}": tools that run on OpenAI\'s servers are not there'
        raise tool.bad("type", f"{message}; give the agent a function of its own")
    tool.check_names(_TOOL_FIELDS)
    function = keep_given(
        name=tool.require("name", tool.text("name")),
        description=tool.text("description"),
        parameters=read_schema(tool, "parameters"),
        strict=tool.flag("strict"),
    )
    return {"type": "function", "function": function}


def _read_tool_choice(fields: Fields) -> str | dict[str, Any] | None:
    found = fields.value.get("tool_choice")
    if found is None or isinstance(found, str):
        return fields.choice("tool_choice", ("auto", "none", "required"))
    choice = Fields(found, fields.at("tool_choice"))
    if choice.value.get("type") != "function":
        raise choice.bad("type", 'only {"type": "function", "name": ...}, "auto", "none" and "required" are known here')
    return {"type": "function", "function": {"name": choice.require("name", choice.text("name"))}}


def _read_format(fields: Fields) -> dict[str, Any] | None:
    """Returns `text.format` as the `response_format` of chat completions, which has the schema one level deeper."""
    text = fields.nested("text")
    found = text.nested("format") if text is not None else None
    if found is None:
        return None
    kind = found.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = keep_given(
            name=found.require("name", found.text("name")),
            schema=found.require("schema", found.nested("schema")).value,
            strict=found.flag("strict"),
            description=found.text("description"),
        )
        return {"type": "json_schema", "json_schema": schema}
    return {"type": kind} if kind == "json_object" else None


def _read_effort(fields: Fields) -> str | None:
    reasoning = fields.nested("reasoning")
    return None if reasoning is None else reasoning.text("effort")
