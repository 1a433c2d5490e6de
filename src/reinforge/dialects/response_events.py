"""A finished response as the events in which OpenAI's Responses API streams it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.events import encode_event, split_text

Event = tuple[str, dict[str, Any]]


def iterate_events(response: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the server-sent events of a response, each with its `sequence_number`.

    Args:
        response: The finished response.
    """
    for number, (name, data) in enumerate(_iterate_response(response)):
        yield encode_event({"type": name, "sequence_number": number, **data}, name)


def _iterate_response(response: Mapping[str, Any]) -> Iterator[Event]:
    started = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield "response.output_item.added", {**place, "item": _empty(item)}
        place["item_id"] = item["id"]
        if item["type"] == "function_call":
            for piece in split_text(item["arguments"]):
                yield "response.function_call_arguments.delta", {**place, "delta": piece}
            whole = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**place, **whole}
        for number, part in enumerate(item.get("content") or ()):
            yield from _iterate_part(part, {**place, "content_index": number})
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": dict(response)}


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an item as it is announced, before any of its text."""
    started = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
    else:
        started["content"] = []
    return started


def _iterate_part(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[Event]:
    """Yields the events of one text; the log-probs of the reply come whole, at its end."""
    kind, field = part["type"], "refusal" if part["type"] == "refusal" else "text"
    with_logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield "response.content_part.added", {**place, "part": {**part, field: "", **with_logprobs}}
    for piece in split_text(part[field]):
        yield f"response.{kind}.delta", {**place, "delta": piece, **with_logprobs}
    done = {**with_logprobs, "logprobs": part["logprobs"]} if with_logprobs else {}
    yield f"response.{kind}.done", {**place, field: part[field], **done}
    yield "response.content_part.done", {**place, "part": dict(part)}
