"""Langfuse: traces, observations and scores, from the page of a trace, a table, the API or the blob storage export.

A generation is a model call. Scores may be in files of their own; they name the trace, the observation or the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.traces.entries import (
    Entry,
    Exchange,
    IgnoredRecordError,
    Rating,
    Record,
    TraceName,
    UnreadableRecordError,
    list_mappings,
)
from reinforge.traces.messages import parse_json, read_messages, read_replies, read_tools
from reinforge.traces.ratings import REWARD_NAMES, THUMB_NAMES, normalize_name, read_value

OBSERVATIONS = (
    "GENERATION",
    "SPAN",
    "EVENT",
    "AGENT",
    "TOOL",
    "CHAIN",
    "RETRIEVER",
    "EVALUATOR",
    "EMBEDDING",
    "GUARDRAIL",
)
_TRACE_FIELDS = ("sessionId", "userId", "bookmarked", "release", "htmlPath", "project_id", "projectId")
_PARENT = "__trace__"


def get(record: Record, name: str) -> Any:
    """Returns a field by its name in the API (`traceId`) or in the blob storage (`trace_id`)."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    return record.get(name, record.get(snake))


class Langfuse:
    """Reads the exports of Langfuse."""

    name = "langfuse"

    def matches(self, record: Record) -> bool:
        if isinstance(record.get("observations"), list | str) and ("trace" in record or "id" in record):
            return True
        return _is_observation(record) or _is_score(record) or _is_trace(record)

    def split(self, record: Record) -> Iterator[Record]:
        """Yields the scores and the observations of a trace, then the trace itself."""
        if _is_observation(record) or _is_score(record):
            yield record
            return
        trace = record.get("trace")
        outer = trace if isinstance(trace, Mapping) else record
        context = {"traceId": outer.get("id"), "sessionId": get(outer, "sessionId")}
        observations = list_mappings(parse_json(record.get("observations")))
        for score in list_mappings(parse_json(record.get("scores") or outer.get("scores"))):
            yield {"traceId": outer.get("id"), **score}
        for each in observations:
            yield context | {key: value for key, value in each.items() if value is not None}
            for score in list_mappings(each.get("scores")):
                yield {"traceId": outer.get("id"), "observationId": each.get("id"), **score}
        has_calls = any(str(each.get("type", "")).upper() == "GENERATION" for each in observations)
        yield {**outer, _PARENT: True, "has_calls": has_calls}

    def read(self, part: Record) -> Iterator[Entry]:
        """Yields a generation, a score, or what a trace without generations says of input and output."""
        if part.get(_PARENT) or _is_trace(part):
            yield from _read_trace(part)
        elif _is_score(part):
            yield _read_score(part)
        else:
            yield _read_observation(part)


def _is_observation(record: Record) -> bool:
    kind = record.get("type")
    return isinstance(kind, str) and kind.upper() in OBSERVATIONS and bool(get(record, "traceId"))


def _is_score(record: Record) -> bool:
    has_target = any(get(record, key) for key in ("traceId", "observationId", "sessionId"))
    has_value = any(get(record, key) is not None for key in ("value", "stringValue"))
    return has_target and has_value and isinstance(record.get("name"), str) and "input" not in record


def _is_trace(record: Record) -> bool:
    is_trace = "timestamp" in record and "input" in record and any(key in record for key in _TRACE_FIELDS)
    return is_trace and not any(normalize_name(str(key)) in THUMB_NAMES | REWARD_NAMES for key in record)


def _read_observation(record: Record) -> Entry:
    kind = str(record["type"]).upper()
    if kind != "GENERATION":
        raise IgnoredRecordError(f"Langfuse observations of the type {kind}")
    if record.get("level") == "ERROR":
        raise IgnoredRecordError("Langfuse generations that failed")
    given, output = parse_json(record.get("input")), record.get("output")
    if given in (None, "", [], {}):
        raise UnreadableRecordError("the generation has no input; export it with input and output")
    messages = read_messages(record.get("input"))
    tools = given.get("tools") if isinstance(given, Mapping) else None
    parameters = parse_json(get(record, "modelParameters"))
    tools = tools or (parameters.get("tools") if isinstance(parameters, Mapping) else None)
    tools = tools or get(record, "toolDefinitions")
    return Exchange(
        id=str(record.get("id") or ""),
        messages=[*messages, *read_replies(output, messages)],
        num_context=len(messages),
        trace=str(get(record, "traceId") or ""),
        conversation=str(get(record, "sessionId") or ""),
        start=str(get(record, "startTime") or ""),
        tools=read_tools(tools),
    )


def _read_score(record: Record) -> Rating:
    kind = str(get(record, "dataType") or "").upper()
    text, value = get(record, "stringValue"), record.get("value")
    found = read_value(text) if kind in ("BOOLEAN", "CATEGORICAL") and text is not None else read_value(value)
    if found is None:
        found = read_value(value)
    if found is None:
        raise UnreadableRecordError(f"the score {record['name']} is neither a number nor a thumb")
    value = bool(found) if kind == "BOOLEAN" else found
    if observation := get(record, "observationId"):
        return Rating(record["name"], value, "call", str(observation))
    if trace := get(record, "traceId"):
        return Rating(record["name"], value, "trace", str(trace))
    return Rating(record["name"], value, "conversation", str(get(record, "sessionId")))


def _read_trace(record: Record) -> Iterator[Entry]:
    trace, session = str(record.get("id") or ""), str(get(record, "sessionId") or "")
    if trace and session:
        yield TraceName(trace, session)
    for name, value in _list_averages(record):
        yield Rating(name, value, "trace", trace)
    if record.get("has_calls"):
        return
    if record.get("input") in (None, "") or record.get("output") in (None, ""):
        if not session:
            raise IgnoredRecordError("Langfuse traces without input and output")
        return
    messages = read_messages(record["input"])
    start = str(record.get("timestamp") or "")
    replies = read_replies(record["output"], messages)
    yield Exchange(trace, [*messages, *replies], len(messages), trace, session, start, is_summary=True)


def _list_averages(record: Record) -> Iterator[tuple[str, float | bool | None]]:
    scores = parse_json(record.get("scores"))
    for name, value in scores.items() if isinstance(scores, Mapping) else ():
        yield from ((str(name), read_value(each)) for each in (value if isinstance(value, list) else [value]))
