"""Anthropic's Messages API (`/v1/messages`), whose content blocks become the messages of a chat, and back.

system "Be brief."                                     {"role": "system", "content": "Be brief."}
user: text "2 + 2?"                                    {"role": "user", "content": "2 + 2?"}
assistant: thinking "Hm.", text "Let me add.",         {"role": "assistant", "reasoning_content": "Hm.",
  tool_use add {"a": 2}                         <->     "content": "Let me add.", "tool_calls": [add {"a": 2}]}
user: tool_result "4"                                  {"role": "tool", "tool_call_id": ..., "content": "4"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.anthropic_answer import MessageEvents, build_message
from reinforge.dialects.anthropic_input import read_messages
from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead
from reinforge.dialects.fields import Fields, describe, keep_given, read_schema, read_stop

_READ = {"model", "messages", "system", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream",
         "tools", "tool_choice", "thinking", "output_config", "output_format", "metadata"}  # fmt: skip
_IGNORED = {"service_tier", "cache_control", "inference_geo", "speed", "betas", "user_profile_id", "diagnostics"}
_REFUSED = {
    "mcp_servers": "there is no server to connect from; connect to MCP servers in the agent and pass their tools",
    "container": "there is no container; run the code in the agent",
    "context_management": "the conversation is used as it is sent; leave it out",
    "fallbacks": "one model answers; leave it out",
}
_TOOL_FIELDS = {"type", "name", "description", "input_schema", "cache_control", "strict", "defer_loading",
                "input_examples", "eager_input_streaming", "allowed_callers"}  # fmt: skip
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                529: "overloaded_error"}  # fmt: skip


def read_request(body: Mapping[str, Any]) -> ChatCall:
    """Returns the call that a body asks for.

    Raises:
        BadRequest: A field is wrong, or asks for something that no reply can honour.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    fields.check_names(_READ | _IGNORED | set(_REFUSED))
    tools = [_read_tool(each) for each in fields.objects("tools")]
    choice = fields.nested("tool_choice") if tools else None
    thinking, output = _read_thinking(fields), fields.nested("output_config")
    stops = read_stop(fields, "stop_sequences")
    arguments = keep_given(
        messages=read_messages(fields),
        max_tokens=fields.require("max_tokens", fields.integer("max_tokens", least=1)),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        stop=stops or None,
        tools=tools or None,
        tool_choice=None if choice is None else _read_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.flag("disable_parallel_tool_use") else None,
        response_format=_read_format(output, "format") or _read_format(fields, "output_format"),
        reasoning_effort=None if output is None else output.text("effort"),
        extra_body=keep_given(
            top_k=fields.integer("top_k", least=0),
            chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking},
        )
        or None,
    )
    model = fields.require("model", fields.text("model"))
    return ChatCall(arguments, model, stream=bool(fields.flag("stream")), options={"stop_sequences": stops or []})


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    return build_message(completion, call.options["stop_sequences"])


def write_events(completion: Mapping[str, Any], call: ChatCall) -> Iterator[bytes]:
    """Yields the events of a streamed response, from `message_start` to `message_stop`."""
    return MessageEvents(call.options["stop_sequences"]).finish(completion)


def open_events(call: ChatCall, head: ReplyHead) -> MessageEvents:
    return MessageEvents(call.options["stop_sequences"], head)


def write_error(error: BadRequest) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _read_tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type") or "custom"
    if kind != "custom":
        message = f"tools of the type {describe(kind)} run on Anthropic's servers or need their own model"
        raise tool.bad("type", f"{message}; give the agent a tool with an input_schema")
    tool.check_names(_TOOL_FIELDS)
    function = keep_given(
        name=tool.require("name", tool.text("name")),
        description=tool.text("description"),
        parameters=tool.require("input_schema", read_schema(tool, "input_schema")),
        strict=tool.flag("strict"),
    )
    return {"type": "function", "function": function}


def _read_tool_choice(choice: Fields) -> str | dict[str, Any]:
    kind = choice.require("type", choice.choice("type", _TOOL_CHOICES))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.require("name", choice.text("name"))}}
    return _TOOL_CHOICES[kind]


def _read_thinking(fields: Fields) -> bool | None:
    """Returns whether the model is asked to think; None: its template decides. A budget is a wish, not a limit."""
    thinking = fields.nested("thinking")
    if thinking is None:
        return None
    return thinking.require("type", thinking.choice("type", ("enabled", "disabled", "adaptive"))) != "disabled"


def _read_format(fields: Fields | None, name: str) -> dict[str, Any] | None:
    found = None if fields is None else fields.nested(name)
    if found is None:
        return None
    found.require("type", found.choice("type", ("json_schema",)))
    schema = found.require("schema", found.nested("schema")).value
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": dict(schema)}}
