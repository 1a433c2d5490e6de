"""A chat completion as the message and the events of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reinforge.dialects.anthropic_input import INVALID_JSON
from reinforge.dialects.events import encode_event, split_text
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.dialects.strict_json import decode_json

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


def build_message(completion: Mapping[str, Any], stop_sequences: Sequence[str]) -> dict[str, Any]:
    """Returns the finished message.

    Args:
        completion: The chat completion; a message has one choice.
        stop_sequences: Texts at which the client wanted the reply to end.
    """
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


def iterate_events(message: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the server-sent events of a message.

    Args:
        message: The finished message.
    """
    for name, data in _iterate(message):
        yield encode_event({"type": name, **data}, name)


def _iterate(message: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    started = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"message": {**started, "usage": {**message["usage"], "output_tokens": 0}}}
    for index, block in enumerate(message["content"]):
        yield "content_block_start", {"index": index, "content_block": _empty(block)}
        for delta in _iterate_deltas(block):
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield "message_delta", {"delta": ending, "usage": message["usage"]}
    yield "message_stop", {}


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a block as it is announced, before its text or its input."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}
    return {**block, _DELTAS[block["type"]][0]: ""}


def _iterate_deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "tool_use":
        pieces = split_text(json.dumps(block["input"], ensure_ascii=False))
        yield from ({"type": "input_json_delta", "partial_json": piece} for piece in pieces)
        return
    field, kind = _DELTAS[block["type"]]
    yield from ({"type": kind, field: piece} for piece in split_text(block[field]))
