"""A response as the events in which OpenAI's Responses API streams it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import ChatCall, ReplyHead
from reinforge.dialects.events import encode_event, split_text
from reinforge.dialects.reply_deltas import find_rest
from reinforge.dialects.response_output import build_response
from reinforge.types.request import ReplyDelta

Event = tuple[str, dict[str, Any]]
_PARTS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "reasoning_text", "text": ""},
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
}
"""The part of each kind of item whose text comes in pieces."""


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
            if self._open != kind or kind == "function_call":
                yield from self._begin(item)
            if kind == "function_call":
                yield from self._write_call(item)
            for number, part in enumerate(item.get("content") or ()):
                if kind not in self._sent:
                    yield from self._begin_part(part, number)
                for piece in split_text(find_rest(part[_field(part)], self._sent.get(kind, ""))):
                    yield self._write_text(part, piece)
                yield from self._end_part(part)
            yield from self._end_item(item)
        yield f"response.{response['status']}", {"response": dict(response)}

    def _write_call(self, item: Mapping[str, Any]) -> Iterator[Event]:
        for piece in split_text(item["arguments"]):
            yield "response.function_call_arguments.delta", {**self._place, "delta": piece}
        whole = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**self._place, **whole}


def _field(part: Mapping[str, Any]) -> str:
    return "refusal" if part["type"] == "refusal" else "text"


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it is announced, before any of its text."""
    started = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
    else:
        started["content"] = []
    return started
