"""The items of a Responses request as chat messages."""

from __future__ import annotations

from typing import Any

from reinforge.dialects.fields import Fields, describe
from reinforge.types.request import Message

_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text",
          "reasoning_text": "text"}  # fmt: skip


def read_input(fields: Fields) -> list[Message]:
    found = fields.value.get("input")
    if found is None:
        return []
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list):
        raise fields.bad("input", f"expected a text or a list of items, found {describe(found)}")
    items = _Conversation()
    for item in fields.objects("input"):
        items.add(item)
    return items.finish()


class _Conversation:
    """Messages so far; reasoning, a message and function calls in a row are one assistant message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reply: Message | None = None

    def add(self, item: Fields) -> None:
        match item.text("type") or "message":
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item)
            case "function_call_output":
                self._end_reply()
                content = read_text(item, "output")
                call_id = item.require("call_id", item.text("call_id"))
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case "item_reference":
                raise item.bad("type", "items are not stored; send the item itself")
            case other:
                known = "message, reasoning, function_call, function_call_output"
                raise item.bad("type", f"items of the type {describe(other)} are not known here; allowed: {known}")

    def finish(self) -> list[Message]:
        self._end_reply()
        return self.messages

    def _end_reply(self) -> None:
        if self._reply is not None:
            self.messages.append(self._reply)
        self._reply = None

    def _continue_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": None}
        return self._reply

    def _add_message(self, item: Fields) -> None:
        role = item.require("role", item.choice("role", _ROLES))
        content = read_text(item, "content")
        if role != "assistant":
            self._end_reply()
            self.messages.append({"role": role, "content": content})
            return
        if self._reply is not None and (self._reply["content"] is not None or "tool_calls" in self._reply):
            self._end_reply()
        self._continue_reply()["content"] = content

    def _add_reasoning(self, item: Fields) -> None:
        self._end_reply()  # reasoning comes first in a reply
        content = read_text(item, "content" if item.value.get("content") else "summary")
        reply = self._continue_reply()
        if content:
            reply["reasoning_content"] = content

    def _add_call(self, item: Fields) -> None:
        function = {
            "name": item.require("name", item.text("name")),
            "arguments": item.require("arguments", item.text("arguments")),
        }
        call_id = item.require("call_id", item.text("call_id"))
        calls = self._continue_reply().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})


def read_text(item: Fields, name: str) -> str | list[dict[str, Any]]:
    """Returns the text of a field that is a text or a list of parts; several parts stay parts, in the form of a chat.

    Example: `[{"type": "input_text", "text": "a"}]` -> "a".
    """
    found = item.value.get(name)
    if found is None or isinstance(found, str):
        return found or ""
    if not isinstance(found, list):
        raise item.bad(name, f"expected a text or a list of parts, found {describe(found)}")
    texts = [_read_part(part) for part in item.objects(name)]
    if len(texts) < 2 or item.value.get("role") == "assistant" or item.value.get("type") == "reasoning":
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _read_part(part: Fields) -> str:
    kind = part.text("type") or "input_text"
    if (field := _TEXTS.get(kind)) is None:
        raise part.bad("type", f"{describe(kind)} is not known here; the model takes text only")
    return part.require(field, part.text(field))
