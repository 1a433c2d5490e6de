"""Parses tool calls from the text formats of model families into OpenAI's format.

    hermes (Qwen, Hermes)   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of times
    llama3                  {"name": "add", "parameters": {"a": 1}}, optionally after <|python_tag|>; separated by ;

A reply that looks like a call but cannot be parsed stays text: the agent may ask the model again. If the agent fails on
it instead, the episode is the policy's failure, with the reason that `find_bad_call` gives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from reinforge.dialects.strict_json import decode_json, decode_json_prefix
from reinforge.types.request import Message, ModelReply, ModelRequest

_HERMES_START, _HERMES_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


class ToolFormat(StrEnum):
    """The text format of a model family's tool calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """Returns the tool format of a chat template, or None if it does not support tools.

    Args:
        chat_template: The Jinja text; how it writes tool calls identifies the family.
    """
    if "<tool_call>" in chat_template:
        return ToolFormat.HERMES
    if _PYTHON_TAG in chat_template or ("tools" in chat_template and '"parameters"' in chat_template):
        return ToolFormat.LLAMA3
    return None


def add_tool_calls(reply: ModelReply, request: ModelRequest, chat_template: str | None) -> ModelReply:
    """Returns a reply with the tool calls in its text parsed, if the request had tools and the template a tool format.

    Args:
        reply: The model's reply.
        request: The request that it answers.
        chat_template: The model's template, as Jinja text.
    """
    tool_format = detect_tool_format(chat_template or "") if request.tools else None
    if tool_format is None:
        return reply
    parsed = read_tool_calls(str(reply.message["content"]), tool_format)
    if parsed.failure is not None:
        return replace(reply, failure=f"the model wrote a tool call that cannot be parsed: {parsed.failure}")
    if not parsed.calls:
        return reply
    return replace(
        reply,
        message=parsed.build_message(f"call-{request.sampling.seed or 0:x}"),
        finish_reason="tool_calls",
    )


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The text and the tool calls of a model's reply.

    Attributes:
        content: The text around the calls; the whole reply if there are none.
        calls: Name and arguments of each call.
        failure: Why what looks like a call cannot be parsed; None: it can, or nothing looks like a call.
    """

    content: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    failure: str | None = None

    def build_message(self, call_id: str) -> Message:
        """Returns the assistant message in OpenAI's format; the number of each call is appended to `call_id`."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        return {
            "role": "assistant",
            "content": self.content or None,
            "tool_calls": [
                {
                    "id": f"{call_id}-{number}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for number, (name, arguments) in enumerate(self.calls)
            ],
        }


def parse_tool_calls(text: str, tool_format: ToolFormat, call_id: str) -> Message:
    """Returns the assistant message for a model's text; text that looks like a call but cannot be parsed stays text.

    Example: `parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', HERMES, "c1")` ->
    `{"role": "assistant", "content": None, "tool_calls": [{"id": "c1-0", "type": "function", "function": {"name": "f",
    "arguments": "{}"}}]}`.

    Args:
        text: The whole reply, without special tokens.
        tool_format: The format of the model family.
        call_id: Prefix of the call ids; the number of the call is appended.
    """
    return read_tool_calls(text, tool_format).build_message(call_id)


def read_tool_calls(text: str, tool_format: ToolFormat) -> ParsedReply:
    """Returns the text and the tool calls of a reply.

    Args:
        text: The whole reply, without special tokens.
        tool_format: The format of the model family.
    """
    read = _read_hermes if tool_format is ToolFormat.HERMES else _read_llama3
    try:
        return read(text)
    except ValueError as error:
        return ParsedReply(text, failure=str(error))


def find_bad_call(message: Message) -> str | None:
    """Returns why the arguments of a tool call are unusable; None: they are valid, or there are no calls.

    For replies of a hosted policy, whose calls come parsed but whose arguments are text as the model wrote it.

    Args:
        message: An assistant message in OpenAI's format.
    """
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(arguments, str) or not arguments.strip():  # a call without arguments; not a function
            continue
        try:
            if not isinstance(decode_json(arguments), dict):
                raise ValueError("not an object")
        except ValueError as error:
            return f"the model wrote arguments of the tool {str(name)[:80]!r} that cannot be parsed: {error}"
    return None


def _read_hermes(text: str) -> ParsedReply:
    content, calls, position = [], [], 0
    while (start := text.find(_HERMES_START, position)) >= 0:
        content.append(text[position:start])
        end = text.find(_HERMES_END, start)
        end = len(text) if end < 0 else end  # the end token may have cut it off
        calls.append(_read_call(decode_json(text[start + len(_HERMES_START) : end].strip()), "arguments"))
        position = end + len(_HERMES_END)
    return ParsedReply("".join([*content, text[position:]]).strip() if calls else text, calls)


def _read_llama3(text: str) -> ParsedReply:
    before, tag, after = text.partition(_PYTHON_TAG)
    body, calls, position = (after if tag else text).strip(), [], 0
    try:
        while position < len(body):
            value, position = decode_json_prefix(body, position)
            calls.append(_read_call(value, "parameters"))
            while position < len(body) and body[position] in "; \n":
                position += 1
    except ValueError:
        if not tag and not _begins_with_call(body):
            return ParsedReply(text)
        raise
    return ParsedReply(before.strip() if tag else "", calls) if calls else ParsedReply(text)


def _begins_with_call(body: str) -> bool:
    """Returns True for `{"name": ...`, which other JSON answers do not begin with."""
    return body.startswith("{") and body[1:].lstrip().startswith('"name"')


def _read_call(value: Any, key: str) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments of a call; also accepts the other family's key for the arguments.

    Raises:
        ValueError: The value is no call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('not an object with a "name"')
    arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments", {}))
    if not isinstance(arguments, dict):
        raise ValueError(f"the {key} are not an object")
    return value["name"], arguments
