"""OpenTelemetry GenAI: spans and log events, as OTLP JSON or as the SDKs print them.

Where a model call keeps its messages has changed over the years; all of these are read:

    attributes  gen_ai.input.messages, gen_ai.output.messages, gen_ai.system_instructions     since 1.37
    events      gen_ai.user.message, gen_ai.assistant.message, gen_ai.tool.message, gen_ai.choice   1.28 to 1.36
    events      gen_ai.content.prompt, gen_ai.content.completion                               before
    attributes  gen_ai.prompt.0.role, gen_ai.prompt.0.content, gen_ai.completion.0.content     OpenLLMetry
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.traces import entries
from reinforge.traces.messages import parse_json, read_message, read_messages, read_reply, read_tools
from reinforge.traces.ratings import read_first_value
from reinforge.types.request import Message

EVENT_ROLES = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
CHOICE, EVALUATION = "gen_ai.choice", "gen_ai.evaluation.result"
DETAILS = "gen_ai.client.inference.operation.details"
_OTHER_OPERATIONS = ("embeddings", "execute_tool", "invoke_agent", "create_agent", "invoke_workflow", "retrieval")
_INDEXED = re.compile(r"(?:gen_ai|llm)\.(prompt|completion)s?\.(\d+)\.(.+)")
_INDEXED_CALL = re.compile(r"tool_calls\.(\d+)\.(id|name|arguments)")
_INDEXED_TOOL = re.compile(r"(?:gen_ai|llm)\.request\.functions\.(\d+)\.(name|description|parameters)")
BATCHES = ("resourceSpans", "resource_spans", "resourceLogs", "resource_logs")
_SCALARS = ("stringValue", "intValue", "doubleValue", "boolValue")


def decode_value(value: Any) -> Any:
    """Returns a value of OTLP JSON as plain data: `{"intValue": "3"}` -> 3."""
    if not isinstance(value, Mapping):
        return value
    for name in _SCALARS:
        if name in value:
            return int(value[name]) if name == "intValue" else value[name]
    if isinstance(value.get("arrayValue"), Mapping):
        return [decode_value(each) for each in value["arrayValue"].get("values") or ()]
    if isinstance(value.get("kvlistValue"), Mapping):
        return decode_attributes(value["kvlistValue"].get("values"))
    return dict(value)


def decode_attributes(attributes: Any) -> dict[str, Any]:
    if isinstance(attributes, Mapping):
        return {str(key): decode_value(value) for key, value in attributes.items()}
    return {str(each.get("key")): decode_value(each.get("value")) for each in entries.list_mappings(attributes)}


class OpenTelemetry(entries.ExportFormat):
    name = "opentelemetry"

    def matches(self, record: entries.Record) -> bool:
        if any(key in record for key in BATCHES):
            return True
        context = record.get("context")
        is_span = "spanId" in record or "span_id" in record or (isinstance(context, Mapping) and "span_id" in context)
        return is_span and ("attributes" in record or "events" in record or "body" in record)

    def split(self, record: entries.Record) -> Iterator[entries.Record]:
        resources = [each for name in BATCHES for each in entries.list_mappings(record.get(name))]
        if not resources:
            yield record
        for resource in resources:
            names = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "scopeLogs", "scope_logs")
            for scope in (scope for name in names for scope in entries.list_mappings(resource.get(name))):
                for name in ("spans", "logRecords", "log_records"):
                    yield from entries.list_mappings(scope.get(name))

    def read(self, part: entries.Record) -> Iterator[entries.Entry]:
        attributes = decode_attributes(part.get("attributes"))
        given = part.get("context")
        context = given if isinstance(given, Mapping) else part
        span = entries.get_text(context, "spanId", "span_id")
        place = {
            "trace": entries.get_text(context, "traceId", "trace_id"),
            "start": entries.get_text(part, "startTimeUnixNano", "start_time", "timeUnixNano"),
            "conversation": entries.get_text(attributes, "gen_ai.conversation.id", "session.id", "thread.id"),
        }
        event = part.get("eventName") or part.get("event_name") or attributes.get("event.name")
        if event and event != DETAILS:
            yield from _read_log_event(str(event), part, attributes, span, place)
            return
        events = [
            (str(each.get("name")), decode_attributes(each.get("attributes")))
            for each in entries.list_mappings(part.get("events"))
        ]
        for name, found in events:
            if name == EVALUATION:
                yield _read_evaluation(found, span)
        yield _read_span(attributes, events, span, place)


Events = list[tuple[str, dict[str, Any]]]
Place = Mapping[str, Any]  # trace, start and conversation of a span


def _first(attributes: entries.Record, *names: str) -> Any:
    return next((attributes[name] for name in names if attributes.get(name)), None)


def _read_span(
    attributes: entries.Record, events: Events, span: str, place: Place
) -> entries.Exchange | entries.MissingContent:
    operation = entries.get_text(attributes, "gen_ai.operation.name")
    if operation in _OTHER_OPERATIONS:
        raise entries.IgnoredRecordError(f"spans of the operation {operation}")
    if not any(key.startswith(("gen_ai.", "llm.")) for key in attributes):
        raise entries.IgnoredRecordError("spans that are not model calls")
    if attributes.get("error.type"):
        raise entries.IgnoredRecordError("spans of model calls that failed")
    prompt, reply = _read_attributes(attributes) or _read_indexed(attributes) or _read_events(events) or ([], None)
    if not prompt or reply is None:
        if operation or prompt:
            what = "let the instrumentation capture message content, and export its log events too"
            return entries.MissingContent(span, f"a span of a model call has no messages or no reply; {what}")
        raise entries.IgnoredRecordError("spans that are not model calls")
    tools = read_tools(_first(attributes, "gen_ai.tool.definitions", "gen_ai.request.tools"))
    return entries.Exchange.of_call(prompt, reply, id=span, tools=tools or _read_indexed_tools(attributes), **place)


def _read_attributes(attributes: entries.Record) -> tuple[list[Message], Message | None] | None:
    given = _first(attributes, "gen_ai.input.messages", "gen_ai.prompt", "llm.prompts")
    output = _first(attributes, "gen_ai.output.messages", "gen_ai.completion", "llm.completions")
    if given is None:
        return None
    prompt = read_messages(given)
    if system := parse_json(attributes.get("gen_ai.system_instructions")):
        prompt = [*read_message({"role": "system", "content": system}), *prompt]
    return prompt, read_reply(output) if output else None


def _read_events(events: Events) -> tuple[list[Message], Message | None] | None:
    prompt, reply = list[Message](), None
    for name, found in events:
        if name in EVENT_ROLES:
            prompt += read_message(_as_message(found, EVENT_ROLES[name]))
        elif name == CHOICE and reply is None:
            reply = _read_choice(found)
        elif name == "gen_ai.content.prompt":
            prompt = read_messages(found.get("gen_ai.prompt"))
        elif name == "gen_ai.content.completion" and reply is None:
            reply = read_reply(found.get("gen_ai.completion"))
    return (prompt, reply) if prompt else None


def _as_message(body: entries.Record, role: str) -> dict[str, Any]:
    return {"role": role} | {
        key.removeprefix("gen_ai.event."): parse_json(value) if key != "content" else value
        for key, value in body.items()
    }


def _read_choice(body: entries.Record) -> Message:
    message = parse_json(body.get("message"))
    found = message if isinstance(message, Mapping) else _as_message(body, "assistant")
    return read_reply({**found, "role": "assistant"})


def _read_indexed(attributes: entries.Record) -> tuple[list[Message], Message | None] | None:
    found: dict[str, dict[int, dict[str, Any]]] = {"prompt": defaultdict(dict), "completion": defaultdict(dict)}
    for key, value in attributes.items():
        if (match := _INDEXED.fullmatch(key)) is None:
            continue
        message = found[match[1]][int(match[2])]
        if (call := _INDEXED_CALL.fullmatch(match[3])) is not None:
            message.setdefault("calls", {}).setdefault(int(call[1]), {})[call[2]] = value
        else:
            is_list = match[3] == "content" and str(value).startswith('[{"type"')
            message[match[3]] = parse_json(value) if is_list else value
    if not found["prompt"]:
        return None
    prompt = [each for _, body in sorted(found["prompt"].items()) for each in read_message(_join_calls(body, "user"))]
    reply = next((read_reply(_join_calls(body, "assistant")) for _, body in sorted(found["completion"].items())), None)
    return prompt, reply


def _join_calls(body: dict[str, Any], role: str) -> dict[str, Any]:
    calls = [call for _, call in sorted(body.pop("calls", {}).items())]
    return {"role": role, **body, **({"tool_calls": calls} if calls else {})}


def _read_indexed_tools(attributes: entries.Record) -> list[dict[str, Any]] | None:
    tools: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in attributes.items():
        if (match := _INDEXED_TOOL.fullmatch(key)) is not None:
            tools[int(match[1])][match[2]] = value
    return read_tools([tool for _, tool in sorted(tools.items())])


def _read_log_event(
    event: str, record: entries.Record, attributes: entries.Record, span: str, place: Place
) -> Iterator[entries.Entry]:
    body = decode_value(record.get("body"))
    body = body if isinstance(body, Mapping) else {"content": body} if body else attributes
    if event == EVALUATION:
        yield _read_evaluation({**attributes, **body}, span)
        return
    if event not in EVENT_ROLES and event != CHOICE:
        raise entries.IgnoredRecordError(f"log events {event}")
    if not span:
        raise entries.UnreadableRecordError(f"the log event {event} names no span")
    is_reply = event == CHOICE
    for message in [_read_choice(body)] if is_reply else read_message(_as_message(body, EVENT_ROLES[event])):
        yield entries.LooseMessage(span, message, is_reply=is_reply, **place)


def _read_evaluation(attributes: entries.Record, span: str) -> entries.Rating:
    scores = (attributes.get(f"gen_ai.evaluation.score.{name}") for name in ("value", "label"))
    return entries.Rating(
        entries.get_text(attributes, "gen_ai.evaluation.name") or "evaluation", read_first_value(*scores), "call", span
    )
