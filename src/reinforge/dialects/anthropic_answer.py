"""A chat completion as the message and the events of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reinforge.dialects.anthropic_input import INVALID_JSON
from reinforge.dialects.chat_call import ReplyHead
from reinforge.dialects.events import encode_event, split_text
from reinforge.dialects.reply_deltas import find_rest
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.dialects.strict_json import decode_json
from reinforge.types.request import ReplyDelta

Event = tuple[str, dict[str, Any]]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


def build_message(completion: Mapping[str, Any], stop_sequences: Sequence[str]) -> dict[str, Any]:
    choice, usage = completion["choices"][0], completion["usage"]
    reason, stopped_by = _STOP_REASONS.get(choice["finish_reason"], "end_turn"), None
    if reason == "end_turn" and (stopped_by := _find_stop(choice, stop_sequences)) is not None:
        reason = "stop_sequence"
    return {
        "id": f"msg_{completion['id']}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": _build_blocks(choice["message"]),
        "stop_reason": reason,
        "stop_sequence": stopped_by,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _find_stop(choice: Mapping[str, Any], stop_sequences: Sequence[str]) -> str | None:
    """Returns the stop text that the sampled tokens end with and the reply's text does not; None: none, or unknown."""
    tokens = read_tokens(choice) if stop_sequences else None
    sampled = "".join(tokens.texts) if tokens is not None else ""
    content = choice["message"].get("content") or ""
    return next((each for each in stop_sequences if each in sampled and each not in content), None)


def _build_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content") or message.get("refusal"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_build_call(call) for call in message.get("tool_calls") or ()]


def _build_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        value = decode_json(arguments)
    except ValueError:
        value = None
    given = value if isinstance(value, dict) else {INVALID_JSON: arguments}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


class MessageEvents:
    """Writes the events of a message, block by block: texts in pieces as they come, the rest once it is finished."""

    def __init__(self, stop_sequences: Sequence[str], head: ReplyHead | None = None):
        self._stop_sequences, self._head = stop_sequences, head
        self._has_started = False
        self._sent: dict[str, str] = {}
        self._open: str | None = None
        self._index = -1

    def write(self, delta: ReplyDelta) -> bytes:
        return b"".join(_encode(event) for event in self._write(delta))

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        for event in self._finish(build_message(completion, self._stop_sequences)):
            yield _encode(event)

    def _write(self, delta: ReplyDelta) -> Iterator[Event]:
        yield from self._start()
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if self._open != kind:
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._begin_block({"type": kind, _DELTAS[kind][0]: "", **empty})
                yield self._write_text(kind, text)

    def _start(self, message: Mapping[str, Any] | None = None) -> Iterator[Event]:
        if self._has_started:
            return
        self._has_started = True
        if message is None:
            assert self._head is not None
            message = build_message(self._head.build_completion(), self._stop_sequences)
        started = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": {**started, "usage": {**message["usage"], "output_tokens": 0}}}

    def _begin_block(self, block: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_block()
        self._index, self._open = self._index + 1, block["type"]
        self._sent.setdefault(block["type"], "")
        yield "content_block_start", {"index": self._index, "content_block": _empty(block)}

    def _end_block(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._index}

    def _write_text(self, kind: str, text: str) -> Event:
        field, name = _DELTAS[kind]
        self._sent[kind] += text
        return "content_block_delta", {"index": self._index, "delta": {"type": name, field: text}}

    def _finish(self, message: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._start(message)
        for block in message["content"]:
            kind = block["type"]
            if kind == "tool_use":
                yield from self._begin_block(block)
                for piece in split_text(json.dumps(block["input"], ensure_ascii=False)):
                    delta = {"type": "input_json_delta", "partial_json": piece}
                    yield "content_block_delta", {"index": self._index, "delta": delta}
                continue
            if kind in self._sent and self._open != kind:  # it was sent, and ended
                continue
            if self._open != kind:
                yield from self._begin_block(block)
            for piece in split_text(find_rest(block[_DELTAS[kind][0]], self._sent[kind])):
                yield self._write_text(kind, piece)
        yield from self._end_block()
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield "message_delta", {"delta": ending, "usage": message["usage"]}
        yield "message_stop", {}


def _encode(event: Event) -> bytes:
    name, data = event
    return encode_event({"type": name, **data}, name)


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a block as it is announced, before its text or its input."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}
    return {**block, _DELTAS[block["type"]][0]: ""}
