"""Imports exports of tracing tools and chat logs as rows of conversations.

    {"id": "c7", "conversation": "s1", "messages": [..], "tools": [..], "label": true, "scores": {"thumbs": 1.0}}

`conversation` keeps the rows of one conversation in one split. `label` is a thumb, `reward` the score that the user
names; `weight: 0` marks replies that are only context. Rows with a better and a worse reply have `prompt`, `chosen` and
`rejected` instead of `messages`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from reinforge.bounded import load_json, refuse_depth
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.row_limits import find_unusable
from reinforge.files import open_private, storage_boundary
from reinforge.safe_text import redact_known_forms
from reinforge.traces.chat_logs import ChatLogs
from reinforge.traces.entries import (
    ComparedReplies,
    Exchange,
    ExportFormat,
    IgnoredRecordError,
    Rating,
    Record,
    UnreadableRecordError,
    format_time,
)
from reinforge.traces.langfuse import Langfuse
from reinforge.traces.langsmith import LangSmith
from reinforge.traces.litellm import LiteLLM
from reinforge.traces.opentelemetry import OpenTelemetry
from reinforge.traces.ratings import REWARD_NAMES, THUMB_NAMES, normalize_name
from reinforge.traces.records import list_files, read_records
from reinforge.traces.report import ImportReport
from reinforge.traces.store import CallStore, RatingSummary, StoredExchange
from reinforge.types.request import Message

LISTED_FIELDS = 8
SURPRISES = (LookupError, TypeError, ValueError, AttributeError)
"""Exports are the work of other programs, whose records may hold anything anywhere."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """How an export is read."""

    format: str | None = None  # name of an `ExportFormat`; None: detected for each record
    label: str | None = None  # name of the score that is a thumb; None: those with a usual name and two values
    reward: str | None = None  # name of the score that is the reward; None: one that is called reward or score
    columns: dict[str, str] = field(default_factory=dict)  # what a column of a chat log holds -> its name
    rated_only: bool = False
    redact: bool = False
    with_times: bool = False  # the time of a row's first call, where it is known, as its `time`: 2026-01-01T09:00:00Z


def import_traces(sources: Sequence[Path], output: Path, options: ImportOptions) -> ImportReport:
    """Writes the rows of an export, and returns what was read and what was not.

    Args:
        output: The file of rows, in JSONL; replaced if it exists.

    Raises:
        ConfigError: A file cannot be read, or nothing in it can be used.
        StorageError: The rows cannot be written.
    """
    report = ImportReport(output)
    files = list_files(list(sources), output)
    with (
        storage_boundary(output),
        tempfile.TemporaryDirectory(prefix=".import-", dir=output.absolute().parent) as folder,
    ):
        store = CallStore(Path(folder) / "calls.sqlite")
        try:
            stems = Counter(path.stem for path in files)
            for index, path in enumerate(files, start=1):
                prefix = path.stem if stems[path.stem] == 1 else f"{path.stem}.{index}"
                _read_file(path, prefix, store, options, report)
            store.join_messages()
            for location, reason in store.read_missing():
                report.unread.add(location, reason)
            staged = Path(folder) / "rows.jsonl"
            with open(staged, "w", encoding="utf-8", opener=open_private) as file:
                _RowWriter(store, options, report).write(file)
            if not report.num_rows:
                raise ConfigError(_explain_empty(report))
            os.replace(staged, output)
        finally:
            store.close()
    return report


def make_formats(options: ImportOptions) -> list[ExportFormat]:
    named = tuple(name for name in (options.label, options.reward) if name is not None)
    chat_logs = ChatLogs(options.columns, named)
    formats: list[ExportFormat] = [OpenTelemetry(), LangSmith(), LiteLLM(), Langfuse(), chat_logs]
    return [each for each in formats if options.format in (None, each.name)]


def _read_file(path: Path, prefix: str, store: CallStore, options: ImportOptions, report: ImportReport) -> None:
    report.num_files += 1
    formats, problems = make_formats(options), report.unread
    for number, row in enumerate(read_records(path, problems), start=1):
        if not isinstance(row.value, dict):
            problems.add(row.location, f"expected an object, found {type(row.value).__name__}")
            continue
        reader = next((each for each in formats if options.format or each.matches(row.value)), None)
        if reader is None:
            fields = ", ".join(map(str, list(row.value)[:LISTED_FIELDS])) or "no fields"
            absent = [name for name in options.columns.values() if name not in row.value]
            hints = [f'no column "{name}"{did_you_mean(name, map(str, row.value)) or ";"}' for name in absent]
            fix = " ".join([*hints, "give --format, or --column for chat logs"])
            problems.add(row.location, f"no known format (the record has {fields})", fix)
            continue
        report.records[reader.name] += 1
        for part, record in enumerate(_split_record(reader, row.value, row.location, report)):
            fallback_id = f"{prefix}-{number}" + (f"-{part}" if part else "")
            _read_part(reader, record, store, report, (row.location, fallback_id))


def _split_record(reader: ExportFormat, record: Record, location: str, report: ImportReport) -> Iterator[Record]:
    try:
        yield from reader.split(record)
    except SURPRISES as error:
        report.unread.add(location, _describe_surprise(reader, error))


def _read_part(
    reader: ExportFormat, part: Record, store: CallStore, report: ImportReport, place: tuple[str, str]
) -> None:
    location, fallback_id = place
    entries = []
    try:
        with refuse_depth():  # a string of the record may hold JSON whose strings hold JSON
            for entry in reader.read(part):
                entries.append(entry)
                for rating in (entry,) if isinstance(entry, Rating) else getattr(entry, "ratings", ()):
                    if rating.value is None:
                        what = f"{rating.name} is neither a number nor a thumb; the rest of the record is read"
                        report.unread.add(location, what)
    except UnreadableRecordError as error:
        report.unread.add(location, str(error))
    except IgnoredRecordError as error:
        report.ignore(str(error))
    except SURPRISES as error:
        report.unread.add(location, _describe_surprise(reader, error))
    try:
        store.add(entries, location, fallback_id)
    except ValueError as error:  # halves of characters, numbers that JSON does not have
        report.unread.add(location, f"the record cannot be kept: {error}"[:200])


def _describe_surprise(reader: ExportFormat, error: Exception) -> str:
    return f"not what {reader.name} records look like ({type(error).__name__}: {str(error)[:80]})"


def _explain_empty(report: ImportReport) -> list[Problem]:
    ignored = [Problem("", f"{count} × {kind} were ignored") for kind, count in report.ignored.most_common()]
    problems = [*report.unread.list_problems(), *ignored]
    if report.num_unrated:
        problems.append(Problem("", f"{report.num_unrated} rows have no label and no reward", "leave out --rated"))
    return problems or [Problem("", "there are no records in these files")]


class _RowWriter:
    def __init__(self, store: CallStore, options: ImportOptions, report: ImportReport):
        self.store, self.options, self.report = store, options, report
        report.ratings = store.summarize_ratings()
        self.labels = {each.name: each for each in report.ratings if self._is_label(each)}
        self.reward = self._find_reward(report.ratings)
        report.label_names, report.reward_name = list(self.labels), self.reward
        self._ids: Counter[str] = Counter()
        self._aliases: dict[str, str] = {}

    def _is_label(self, rating: RatingSummary) -> bool:
        if self.options.label is not None:
            return rating.name == self.options.label
        return normalize_name(rating.name) in THUMB_NAMES and rating.is_binary and rating.name != self.options.reward

    def _find_reward(self, ratings: Sequence[RatingSummary]) -> str | None:
        names = [each.name for each in ratings]
        for wanted, found in (("reward", self.options.reward), ("label", self.options.label)):
            if found is not None and found not in names:
                fix = f"the scores are {', '.join(names)}" if names else "the export has no scores"
                raise ConfigError(Problem("", f'--{wanted}: no score is called "{found}"', fix))
        for each in ratings:
            if each.name == self.options.label and not each.is_binary:
                values = f'the values of "{each.name}" go from {each.low:g} to {each.high:g}'
                message = f"--label: {values}, but a thumb is 1 or 0, or 1 or -1"
                raise ConfigError(Problem("", message, f"make it the reward: --reward {each.name}"))
        if self.options.reward is not None:
            return self.options.reward
        return next((name for wanted in sorted(REWARD_NAMES) for name in names if normalize_name(name) == wanted), None)

    def write(self, file: TextIO) -> None:
        """Writes the rows, those of a conversation one after another."""
        previous = None
        for conversation, found in self.store.read_traces():
            for row, location in self._build_rows(conversation, found):
                if (problem := find_unusable(row)) is not None:
                    self.report.unread.add(location, problem[0])
                    continue
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self.report.num_rows += 1
                self.report.num_conversations += conversation != previous
                previous = conversation
                self._count(row)
        self.report.num_unused_ratings = self.store.count_unused_ratings()
        self.report.num_repeated = self.store.num_repeated

    def _count(self, row: dict[str, Any]) -> None:
        if "label" in row:
            self.report.labels[row["label"]] += 1
        self.report.num_rewarded += "reward" in row
        self.report.shapes["messages" if "messages" in row else "prompt/chosen/rejected"] += 1

    def _build_rows(self, conversation: str, found: Sequence[StoredExchange]) -> Iterator[tuple[dict[str, Any], str]]:
        location = found[0][1]
        for each, where in found:
            if isinstance(each, ComparedReplies):
                row = {"prompt": each.prompt, "chosen": each.chosen, "rejected": each.rejected}
                yield self._finish(row, each.id, conversation, each.tools), where
        for draft in merge_calls([each for each, _ in found if isinstance(each, Exchange)]):
            try:
                messages = draft.build_messages()
            except UnreadableRecordError as error:
                self.report.unread.add(location, str(error))
                continue
            time = format_time(draft.start) if self.options.with_times else None
            known: dict[str, Any] = {"time": time} if time else {}
            row = {"messages": messages} | known | self._rate(draft, conversation)
            if self.options.rated_only and "label" not in row and "reward" not in row:
                self.report.num_unrated += 1
                continue
            self.report.num_trimmed += len(messages) < len(draft.messages)
            yield self._finish(row, draft.calls[-1], conversation, draft.tools), location

    def _finish(self, row: dict[str, Any], id_: str, conversation: str, tools: Any) -> dict[str, Any]:
        given = id_
        while id_ in self._ids:
            self._ids[given] += 1
            id_ = f"{given}-{self._ids[given]}"
        self._ids[id_] += 1
        row = {"id": id_, "conversation": conversation} | row | ({"tools": tools} if tools else {})
        if not self.options.redact:
            return row
        masked: dict[str, Any] = {
            key: self._mask_id(value) if key in ("id", "conversation") else redact_value(value)
            for key, value in row.items()
        }
        self.report.num_masked += masked != row
        return masked

    def _mask_id(self, id_: str) -> str:
        """Returns an id unchanged, or a number in place of one with an address or a key, which stays one of its own."""
        if id_ not in self._aliases and redact_value(id_) == id_:
            return id_
        return self._aliases.setdefault(id_, f"{redact_value(id_)}-{len(self._aliases) + 1}")

    def _rate(self, draft: Draft, conversation: str) -> dict[str, Any]:
        values: dict[str, list[float]] = {}
        for name, value in self.store.find_ratings(draft.records, draft.calls, draft.trace, conversation):
            values.setdefault(name, []).append(value)
        thumbs = {
            value > 0
            for name, label in self.labels.items()
            for value in values.get(name, ())
            if value != 0 or label.low >= 0  # on a scale from -1 to 1, 0 is neither
        }
        self.report.num_contradictory += len(thumbs) > 1
        means = {name: sum(found) / len(found) for name, found in values.items()}
        row: dict[str, Any] = {"label": thumbs.pop()} if len(thumbs) == 1 else {}
        if self.reward in means:
            row["reward"] = means[self.reward]
        return row | ({"scores": means} if means else {})


@dataclass
class Draft:
    """A row that later calls may still continue."""

    messages: list[Message]
    trained: set[int]
    keys: list[str]
    tools: list[dict[str, Any]] | None
    calls: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    trace: str = ""
    start: str = ""  # sort key of its first call

    def build_messages(self) -> list[Message]:
        """Returns the messages up to the last reply, context with `weight: 0`."""
        first = next((i for i, message in enumerate(self.messages) if message["role"] in ("user", "tool")), None)
        trained = {i for i in self.trained if first is not None and i > first and _is_trainable(self.messages[i])}
        if not trained:
            if first is not None and any(i > first and not _has_content(self.messages[i]) for i in self.trained):
                raise UnreadableRecordError("the reply is empty")
            roles = ", ".join(message["role"] for message in self.messages[:6]) or "none"
            raise UnreadableRecordError(f"no reply to a message of the user (roles: {roles})")
        kept = self.messages[: max(trained) + 1]
        return [
            {**message, "weight": 0} if message["role"] == "assistant" and i not in trained else message
            for i, message in enumerate(kept)
        ]


def _is_trainable(message: Message) -> bool:
    """Returns False for a reply that is only context, or that is empty, such as a refusal recorded elsewhere."""
    return message.get("weight", 1) != 0 and _has_content(message)


def _has_content(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def merge_calls(exchanges: Sequence[Exchange]) -> list[Draft]:
    """Returns the rows of a trace, given its exchanges in their order; a summary counts only without any calls."""
    calls = [each for each in exchanges if not each.is_summary] or list(exchanges[:1])
    drafts: list[Draft] = []
    for call in calls:
        keys = [_make_key(message) for message in call.messages]
        continued = next((draft for draft in reversed(drafts) if _continues(call, keys, draft)), None)
        first = call.num_context
        trained = {i for i, each in enumerate(call.messages) if i >= first and each["role"] == "assistant"}
        if continued is None:
            ids = [call.id], [call.record], call.trace
            drafts.append(Draft(list(call.messages), trained, keys, call.tools, *ids, call.start))
            continue
        continued.messages += call.messages[len(continued.keys) :]
        continued.trained |= trained
        continued.keys = keys
        continued.calls.append(call.id)
        continued.records.append(call.record)
    return drafts


def _continues(call: Exchange, keys: list[str], draft: Draft) -> bool:
    length = len(draft.keys)
    return length <= call.num_context and draft.tools == call.tools and keys[:length] == draft.keys


def _make_key(message: Message) -> str:
    """Returns what is equal for a reply and for the same reply in a later prompt: no ids, no reasoning."""
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message.get("content") or "", calls])


def _normalize_call(call: dict[str, Any]) -> list[str]:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError):
        arguments = json.dumps(load_json(arguments), sort_keys=True)
    return [call["function"]["name"], arguments]


EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}")


def redact_value(value: Any) -> Any:
    """Returns plain data in which every text is masked; names of fields stay."""
    if isinstance(value, str):
        return EMAIL.sub("[email]", redact_known_forms(value))
    if isinstance(value, dict):
        return {key: redact_value(each) for key, each in value.items()}
    return [redact_value(each) for each in value] if isinstance(value, list) else value
