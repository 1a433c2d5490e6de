"""A response as the events in which OpenAI's Responses API streams it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import ChatCall, ReplyHead, encode_event, find_rest, split_text
from reinforge.dialects.client_tools import write_call
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.types.request import ReplyDelta

Event = tuple[str, dict[str, Any]]
_PARTS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
"""The part of each kind of item whose text comes in pieces."""
_INPUTS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""Items of calls whose input comes in pieces: the name of these events, and the field of the item."""


class ResponseEvents:
    """Writes the events of a response, item by item: texts in pieces as they come, the rest once it is finished."""

    def __init__(self, call: ChatCall, head: ReplyHead | None = None):
        self._call, self._head = call, head
        self._number = 0
        self._has_started = False
        self._sent: dict[str, str] = {}
        self._open: str | None = None
        self._index = -1

    def write(self, delta: ReplyDelta) -> bytes:
        return b"".join(self._encode(event) for event in self._write(delta))

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        for event in self._finish(build_response(completion, self._call)):
            yield self._encode(event)

    def _encode(self, event: Event) -> bytes:
        name, data = event
        number, self._number = self._number, self._number + 1
        return encode_event({"type": name, "sequence_number": number, **data}, name)

    def _write(self, delta: ReplyDelta) -> Iterator[Event]:
        assert self._head is not None
        if not self._has_started:
            yield from self._start(build_response(self._head.build_completion(), self._call))
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if not text:
                continue
            if self._open != kind:
                if self._open is not None:
                    yield from self._end_text()
                yield from self._begin(self._build_item(kind, ""))
                yield from self._begin_part(_PARTS[kind])
            yield self._write_text(_PARTS[kind], text)

    def _start(self, response: Mapping[str, Any]) -> Iterator[Event]:
        if self._has_started:
            return
        self._has_started = True
        started = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield "response.created", {"response": started}
        yield "response.in_progress", {"response": started}

    def _build_item(self, kind: str, text: str) -> dict[str, Any]:
        assert self._head is not None
        part = {**_PARTS[kind], "text": text}
        if kind == "reasoning":
            item = {"id": f"rs_{self._head.call_id}", "type": kind, "summary": [], "content": [part]}
        else:
            item = {"id": f"msg_{self._head.call_id}", "type": kind, "role": "assistant", "content": [part]}
        return {**item, "status": "completed"}

    def _begin(self, item: Mapping[str, Any]) -> Iterator[Event]:
        self._index, self._open = self._index + 1, item["type"]
        yield "response.output_item.added", {"output_index": self._index, "item": _empty(item)}
        self._place = {"output_index": self._index, "item_id": item["id"]}

    def _begin_part(self, part: Mapping[str, Any], number: int = 0) -> Iterator[Event]:
        self._place = {**self._place, "content_index": number}
        with_logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**self._place, "part": {**part, _field(part): "", **with_logprobs}}

    def _write_text(self, part: Mapping[str, Any], text: str) -> Event:
        assert self._open is not None
        self._sent[self._open] = self._sent.get(self._open, "") + text
        with_logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        return f"response.{part['type']}.delta", {**self._place, "delta": text, **with_logprobs}

    def _end_part(self, part: Mapping[str, Any]) -> Iterator[Event]:
        """Ends a text; the log-probs of the reply come whole, here."""
        kind, field = part["type"], _field(part)
        done = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        yield f"response.{kind}.done", {**self._place, field: part[field], **done}
        yield "response.content_part.done", {**self._place, "part": dict(part)}

    def _end_item(self, item: Mapping[str, Any]) -> Iterator[Event]:
        self._open = None
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def _end_text(self) -> Iterator[Event]:
        """Ends an item whose text was sent in pieces, since another one follows."""
        assert self._open is not None
        item = self._build_item(self._open, self._sent[self._open])
        yield from self._end_part(item["content"][0])
        yield from self._end_item(item)

    def _finish(self, response: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._start(response)
        for item in response["output"]:
            kind = item["type"]
            if kind in self._sent and self._open != kind:  # it was sent, and ended
                continue
            if self._open != kind or kind not in _PARTS:
                yield from self._begin(item)
            if kind in _INPUTS:
                yield from self._write_call(item, *_INPUTS[kind])
            for number, part in enumerate(item.get("content") or ()):
                if kind not in self._sent:
                    yield from self._begin_part(part, number)
                for piece in split_text(find_rest(part[_field(part)], self._sent.get(kind, ""))):
                    yield self._write_text(part, piece)
                yield from self._end_part(part)
            yield from self._end_item(item)
        yield f"response.{response['status']}", {"response": dict(response)}

    def _write_call(self, item: Mapping[str, Any], event: str, name: str) -> Iterator[Event]:
        for piece in split_text(item[name]):
            yield f"response.{event}.delta", {**self._place, "delta": piece}
        named = {"name": item["name"]} if name == "arguments" else {}
        yield f"response.{event}.done", {**self._place, name: item[name], **named}


def _field(part: Mapping[str, Any]) -> str:
    return "refusal" if part["type"] == "refusal" else "text"


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it is announced, before any of its text."""
    started = {**item, "status": "in_progress"}
    if item["type"] in _INPUTS:
        started[_INPUTS[item["type"]][1]] = ""
    elif item["type"] in _PARTS:
        started["content"] = []
    return started


_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "temperature": None, "top_p": None, "metadata": {},
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "reasoning": None, "text": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of the request that a response repeats, with the value of an absent one."""


def build_response(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    choice, body = completion["choices"][0], call.options["body"]
    is_cut = choice["finish_reason"] == "length"
    usage, details = completion["usage"], completion["usage"].get("completion_tokens_details") or {}
    text = body.get("text") or {}
    return {
        "id": f"resp_{completion['id']}",
        "object": "response",
        "created_at": completion["created"],
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": completion["model"],
        "output": _build_output(completion["id"], choice, call),
        "previous_response_id": None,
        "store": False,
        **{name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens") or 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _build_output(call_id: str, choice: Mapping[str, Any], call: ChatCall) -> list[dict[str, Any]]:
    message, items = choice["message"], list[dict[str, Any]]()
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    calls = message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{call_id}", "type": "reasoning", "summary": [], "content": content, "status": status})
    if message.get("refusal"):
        content = [{"type": "refusal", "refusal": message["refusal"]}]
        items.append(_build_message(call_id, content, status))
    elif message.get("content") or not (calls or reasoning):
        tokens = read_tokens(choice) if call.options["logprobs"] else None
        logprobs = tokens.build_content() if tokens is not None else []
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": logprobs}
        items.append(_build_message(call_id, [part], status))
    kinds = call.options["kinds"]
    return items + [write_call(each, f"fc_{call_id}-{number}", kinds) for number, each in enumerate(calls)]


def _build_message(call_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "status": status, "content": content}
