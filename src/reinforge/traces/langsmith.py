"""LangSmith: runs from `list_runs`, the API or a bulk export, and feedback.

A run of the type `llm` is a model call. `feedback_stats` of a run holds the mean of each feedback; a conversation is
the thread that `extra.metadata` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from reinforge.traces import entries
from reinforge.traces.messages import get_mapping, parse_json, read_messages, read_replies, read_tools
from reinforge.traces.ratings import read_first_value, read_value

THREAD_KEYS = ("thread_id", "session_id", "conversation_id")


class LangSmith(entries.ExportFormat):
    name = "langsmith"

    def matches(self, record: entries.Record) -> bool:
        return "run_type" in record or ("run_id" in record and "key" in record and "score" in record)

    def split(self, record: entries.Record) -> Iterator[entries.Record]:
        yield record
        for child in entries.list_mappings(record.get("child_runs")):
            yield from self.split(child)

    def read(self, part: entries.Record) -> Iterator[entries.Entry]:
        if "run_type" not in part:
            yield _read_feedback(part)
            return
        is_root, is_call = not part.get("parent_run_id"), part["run_type"] == "llm"
        trace, id_ = entries.get_text(part, "trace_id", "id"), entries.get_text(part, "id")
        level: entries.Level = "trace" if is_root and not is_call else "call"
        for name, value in _list_feedback(part):
            yield entries.Rating(name, value, level, trace if level == "trace" else id_)
        if part.get("error"):
            raise entries.IgnoredRecordError("LangSmith runs that failed")
        if not is_call and not is_root:
            raise entries.IgnoredRecordError(f"LangSmith runs of the type {part['run_type']}")
        yield _read_run(part, id_, trace, is_summary=not is_call)


def _read_run(run: entries.Record, id_: str, trace: str, *, is_summary: bool) -> entries.Exchange:
    inputs, outputs = parse_json(run.get("inputs")), parse_json(run.get("outputs"))
    if not inputs or not outputs:
        raise entries.UnreadableRecordError("the run has no inputs or no outputs; export it with both")
    try:
        messages = read_messages(inputs)
        replies = read_replies(outputs, messages)
    except entries.UnreadableRecordError:
        if is_summary:  # a chain may take and return anything
            raise entries.IgnoredRecordError("LangSmith runs of chains without messages") from None
        raise
    extra = get_mapping(run, "extra")
    tools = get_mapping(run, "inputs").get("tools") or get_mapping(extra, "invocation_params").get("tools")
    metadata = get_mapping(extra, "metadata") or get_mapping(run, "metadata")
    return entries.Exchange.of_call(
        messages,
        *replies,
        id=id_,
        trace=trace,
        conversation=entries.get_text(metadata, *THREAD_KEYS) or entries.get_text(run, "thread_id"),
        start=entries.get_text(run, "dotted_order", "start_time"),
        tools=read_tools(tools),
        is_summary=is_summary,
    )


def _list_feedback(run: entries.Record) -> Iterator[tuple[str, float | bool | None]]:
    for name, stats in get_mapping(run, "feedback_stats").items():
        mean = read_value(stats.get("avg") if isinstance(stats, Mapping) else stats)
        if mean is not None:
            yield str(name), mean
        elif isinstance(stats, Mapping) and isinstance(values := stats.get("values"), Mapping):
            yield from ((str(name), read_value(word)) for word in values)


def _read_feedback(record: entries.Record) -> entries.Rating:
    found = read_first_value(record.get("score"), record.get("value"))
    if found is None:
        raise entries.UnreadableRecordError(f"the feedback {record['key']} is neither a number nor a thumb")
    if not record.get("run_id"):
        return entries.Rating(str(record["key"]), found, "trace", entries.get_text(record, "trace_id"))
    # the run is a call, or the root of a trace
    return entries.Rating(str(record["key"]), found, "any", str(record["run_id"]))
