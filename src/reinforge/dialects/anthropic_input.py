"""The messages of Anthropic's API as chat messages."""

from __future__ import annotations

import json
from typing import Any

from reinforge.dialects.fields import Fields, describe
from reinforge.types.request import Message

INVALID_JSON = "INVALID_JSON"
"""Key under which arguments of a tool that are no JSON object are passed on, as Anthropic recommends."""
_TEXT_ONLY = "the model takes text only"


def read_messages(fields: Fields) -> list[Message]:
    """Returns the system prompt and all messages.

    Raises:
        BadRequest: A message is wrong, or has content that a chat cannot have.
    """
    messages: list[Message] = []
    if fields.value.get("system"):
        messages.append({"role": "system", "content": _read_text(fields, "system")})
    turns = fields.objects("messages")
    if not turns:
        raise fields.bad("messages", "expected at least one message")
    for turn in turns:
        role = turn.require("role", turn.choice("role", ("user", "assistant", "system")))
        if role == "assistant":
            messages.append(_read_reply(turn))
        else:
            messages += _read_turn(turn, role)
    if turns[-1].value["role"] == "assistant":
        reason = "the last message is of the assistant, but a reply cannot be continued here; end with a user's message"
        raise fields.bad("messages", reason)
    return messages


def _read_text(fields: Fields, name: str) -> Any:
    """Returns the text of a text or of a list of text blocks; several stay parts, in the form of a chat."""
    found = fields.value.get(name)
    if found is None or isinstance(found, str):
        return found or ""
    if not isinstance(found, list):
        raise fields.bad(name, f"expected a text or a list of blocks, found {describe(found)}")
    return _join([_read_text_block(block) for block in fields.objects(name)])


def _join(texts: list[str]) -> Any:
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _read_text_block(block: Fields) -> str:
    kind = block.require("type", block.text("type"))
    if kind != "text":
        raise block.bad("type", f"blocks of the type {describe(kind)} are not known here: {_TEXT_ONLY}")
    return block.require("text", block.text("text"))


def _read_turn(turn: Fields, role: str) -> list[Message]:
    """Returns a user's blocks in order: each tool result is a message of its own, texts in a row are one message."""
    if not isinstance(turn.value.get("content"), list):
        return [{"role": role, "content": turn.require("content", turn.text("content"))}]
    messages, texts = list[Message](), list[str]()
    for block in turn.objects("content"):
        if block.value.get("type") != "tool_result":
            texts.append(_read_text_block(block))
            continue
        if texts:
            messages.append({"role": role, "content": _join(texts)})
            texts = []
        call_id = block.require("tool_use_id", block.text("tool_use_id"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _read_text(block, "content")})
    if texts or not messages:
        messages.append({"role": role, "content": _join(texts)})
    return messages


def _read_reply(turn: Fields) -> Message:
    content = turn.value.get("content")
    if not isinstance(content, list):
        return {"role": "assistant", "content": turn.require("content", turn.text("content"))}
    reply: Message = {"role": "assistant", "content": None}
    for block in turn.objects("content"):
        match block.value.get("type"):
            case "thinking":
                thought = block.require("thinking", block.text("thinking"))
                reply["reasoning_content"] = reply.get("reasoning_content", "") + thought
            case "tool_use":
                reply.setdefault("tool_calls", []).append(_read_call(block))
            case _:
                reply["content"] = (reply["content"] or "") + _read_text_block(block)
    if not reply.get("tool_calls") and reply["content"] is None:
        reply["content"] = ""
    return reply


def _read_call(block: Fields) -> dict[str, Any]:
    value = block.require("input", block.nested("input")).value
    is_invalid = list(value) == [INVALID_JSON] and isinstance(value[INVALID_JSON], str)
    arguments = value[INVALID_JSON] if is_invalid else json.dumps(value, ensure_ascii=False)
    name = block.require("name", block.text("name"))
    call_id = block.require("id", block.text("id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
