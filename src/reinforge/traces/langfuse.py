"""Langfuse: traces, observations and scores, from the page of a trace, a table, the API or the blob storage export.

A generation is a model call. Scores may be in files of their own; they name the trace, the observation or the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.traces import entries
from reinforge.traces.messages import get_mapping, parse_json, read_messages, read_replies, read_tools
from reinforge.traces.ratings import REWARD_NAMES, THUMB_NAMES, normalize_name, read_first_value, read_value

OBSERVATIONS = (
    *("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN"),
    *("RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL"),
)
_TRACE_FIELDS = ("sessionId", "userId", "bookmarked", "release", "htmlPath", "project_id", "projectId")
_PARENT = "__trace__"


def get(record: entries.Record, name: str) -> Any:
    """Returns a field by its name in the API (`traceId`) or in the blob storage (`trace_id`)."""
    snake = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    return record.get(name, record.get(snake))


class Langfuse(entries.ExportFormat):
    name = "langfuse"

    def matches(self, record: entries.Record) -> bool:
        if isinstance(record.get("observations"), list | str) and ("trace" in record or "id" in record):
            return True
        return _is_observation(record) or _is_score(record) or _is_trace(record)

    def split(self, record: entries.Record) -> Iterator[entries.Record]:
        if _is_observation(record) or _is_score(record):
            yield record
            return
        trace = record.get("trace")
        outer = trace if isinstance(trace, Mapping) else record
        context = {"traceId": outer.get("id"), "sessionId": get(outer, "sessionId")}
        observations = entries.list_mappings(parse_json(record.get("observations")))
        for score in entries.list_mappings(parse_json(record.get("scores") or outer.get("scores"))):
            yield {"traceId": outer.get("id"), **score}
        for each in observations:
            yield context | {key: value for key, value in each.items() if value is not None}
            for score in entries.list_mappings(each.get("scores")):
                yield {"traceId": outer.get("id"), "observationId": each.get("id"), **score}
        has_calls = any(str(each.get("type", "")).upper() == "GENERATION" for each in observations)
        yield {**outer, _PARENT: True, "has_calls": has_calls}

    def read(self, part: entries.Record) -> Iterator[entries.Entry]:
        if part.get(_PARENT) or _is_trace(part):
            yield from _read_trace(part)
        elif _is_score(part):
            yield _read_score(part)
        else:
            yield _read_observation(part)


def _is_observation(record: entries.Record) -> bool:
    kind = record.get("type")
    return isinstance(kind, str) and kind.upper() in OBSERVATIONS and bool(get(record, "traceId"))


def _is_score(record: entries.Record) -> bool:
    has_target = any(get(record, key) for key in ("traceId", "observationId", "sessionId"))
    has_value = any(get(record, key) is not None for key in ("value", "stringValue"))
    return has_target and has_value and isinstance(record.get("name"), str) and "input" not in record


def _is_trace(record: entries.Record) -> bool:
    is_trace = "timestamp" in record and "input" in record and any(key in record for key in _TRACE_FIELDS)
    return is_trace and not any(normalize_name(str(key)) in THUMB_NAMES | REWARD_NAMES for key in record)


def _read_observation(record: entries.Record) -> entries.Entry:
    kind = str(record["type"]).upper()
    if kind != "GENERATION":
        raise entries.IgnoredRecordError(f"Langfuse observations of the type {kind}")
    if record.get("level") == "ERROR":
        raise entries.IgnoredRecordError("Langfuse generations that failed")
    if parse_json(record.get("input")) in (None, "", [], {}):
        raise entries.UnreadableRecordError("the generation has no input; export it with input and output")
    messages = read_messages(record["input"])
    parameters = get_mapping({"given": get(record, "modelParameters")}, "given")
    tools = get_mapping(record, "input").get("tools") or parameters.get("tools") or get(record, "toolDefinitions")
    return entries.Exchange.of_call(
        messages,
        *read_replies(record.get("output"), messages),
        id=entries.get_text(record, "id"),
        trace=entries.get_text(record, "traceId", "trace_id"),
        conversation=entries.get_text(record, "sessionId", "session_id"),
        start=entries.get_text(record, "startTime", "start_time"),
        tools=read_tools(tools),
    )


def _read_score(record: entries.Record) -> entries.Rating:
    kind = entries.get_text(record, "dataType", "data_type").upper()
    text = get(record, "stringValue") if kind in ("BOOLEAN", "CATEGORICAL") else None
    found = read_first_value(text, record.get("value"))
    if found is None:
        raise entries.UnreadableRecordError(f"the score {record['name']} is neither a number nor a thumb")
    targets: dict[entries.Level, Any] = {"call": get(record, "observationId"), "trace": get(record, "traceId")}
    targets["conversation"] = get(record, "sessionId")
    level = next(level for level, target in targets.items() if target)
    return entries.Rating(record["name"], bool(found) if kind == "BOOLEAN" else found, level, str(targets[level]))


def _read_trace(record: entries.Record) -> Iterator[entries.Entry]:
    trace, session = entries.get_text(record, "id"), entries.get_text(record, "sessionId", "session_id")
    if trace and session:
        yield entries.TraceName(trace, session)
    for name, value in _list_averages(record):
        yield entries.Rating(name, value, "trace", trace)
    if record.get("has_calls"):
        return
    if record.get("input") in (None, "") or record.get("output") in (None, ""):
        if not session:
            raise entries.IgnoredRecordError("Langfuse traces without input and output")
        return
    messages = read_messages(record["input"])
    replies, start = read_replies(record["output"], messages), entries.get_text(record, "timestamp")
    yield entries.Exchange.of_call(
        messages, *replies, id=trace, trace=trace, conversation=session, start=start, is_summary=True
    )


def _list_averages(record: entries.Record) -> Iterator[tuple[str, float | bool | None]]:
    scores = parse_json(record.get("scores"))
    for name, value in scores.items() if isinstance(scores, Mapping) else ():
        yield from ((str(name), read_value(each)) for each in (value if isinstance(value, list) else [value]))
