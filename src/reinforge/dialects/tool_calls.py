"""Parses tool calls from the text formats of model families into OpenAI's format.

    hermes (Qwen, Hermes)   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of times
    llama3                  {"name": "add", "parameters": {"a": 1}}, optionally after <|python_tag|>; separated by ;

A reply that looks like a call but cannot be parsed stays text.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import StrEnum
from typing import Any

from reinforge.types.request import Message, ModelReply, ModelRequest

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
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
    message = parse_tool_calls(str(reply.message["content"]), tool_format, f"call-{request.sampling.seed or 0:x}")
    if "tool_calls" not in message:
        return reply
    return replace(reply, message=message, finish_reason="tool_calls")


def parse_tool_calls(text: str, tool_format: ToolFormat, call_id: str) -> Message:
    """Returns the assistant message for a model's text.

    Text that looks like a call but cannot be parsed stays text: the agent sees the original reply, and may fail on it.

    Example: `parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>', HERMES, "c1")` ->
    `{"role": "assistant", "content": None, "tool_calls": [{"id": "c1-0", "type": "function", "function": {"name": "f",
    "arguments": "{}"}}]}`.

    Args:
        text: The whole reply, without special tokens.
        tool_format: The format of the model family.
        call_id: Prefix of the call ids; the number of the call is appended.
    """
    parse = _parse_hermes if tool_format is ToolFormat.HERMES else _parse_llama3
    content, calls = parse(text)
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {
                "id": f"{call_id}-{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


def _parse_hermes(text: str) -> tuple[str, list[tuple[str, Any]]]:
    calls = [_parse_call(body, "arguments") for body in _HERMES.findall(text)]
    if not calls or None in calls:
        return text, []
    return _HERMES.sub("", text).strip(), [call for call in calls if call is not None]


def _parse_llama3(text: str) -> tuple[str, list[tuple[str, Any]]]:
    before, tag, after = text.partition(_PYTHON_TAG)
    body = after if tag else text
    decoder, calls, position = json.JSONDecoder(), [], 0
    body = body.strip()
    while position < len(body):
        try:
            value, position = decoder.raw_decode(body, position)
        except json.JSONDecodeError:
            return text, []
        call = _read_call(value, "parameters")
        if call is None:
            return text, []
        calls.append(call)
        while position < len(body) and body[position] in "; \n":
            position += 1
    return before.strip() if tag else "", calls


def _parse_call(body: str, key: str) -> tuple[str, Any] | None:
    try:
        return _read_call(json.loads(body), key)
    except json.JSONDecodeError:
        return None


def _read_call(value: Any, key: str) -> tuple[str, Any] | None:
    """Returns name and arguments of a call, or None; also accepts the other family's key for the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments", {}))
    return (value["name"], arguments) if isinstance(arguments, dict) else None
