"""What the records of an export are read into.

Langfuse generation, LangSmith run, GenAI span, LiteLLM log   =>  Exchange: a prompt and its reply
a chat log                                                    =>  Exchange: a whole conversation
a score, a thumb, a feedback                                  =>  Rating: of a call, a trace or a conversation
one line or one event per message                             =>  LooseMessage: put together at the end
chosen and rejected replies                                   =>  ComparedReplies
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Self

from reinforge.types.request import Message

Record = Mapping[str, Any]
EARLIEST_S, LATEST_S = 1e8, 1e11  # 1973 and 5138: smaller numbers count calls, larger ones are no seconds
UNREADABLE = "unreadable"  # role of a loose message that stands for one which could not be read


class UnreadableRecordError(Exception):
    """A record that should hold messages or a score, but cannot be read; the message says why."""


class IgnoredRecordError(Exception):
    """A record that holds nothing to learn from, such as a tool's span; the message names its kind."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation, or the part of it that one model call saw."""

    id: str  # id of the call or the conversation; empty if the export has none
    messages: list[Message]  # all messages, the reply last, in OpenAI's format
    num_context: int = 0
    """Messages before the reply; assistant messages among them are not trained. 0 for a chat log, whose replies are all
    trained."""
    trace: str = ""  # id of the request that the call belongs to; empty if unknown
    conversation: str = ""  # id of the session or thread; empty if unknown
    start: str = ""  # sorts the calls of a trace; empty if unknown
    tools: list[dict[str, Any]] | None = None
    is_summary: bool = False
    """True for the input and output of a whole trace; used only if the export has none of its calls."""
    record: str = ""  # what the store calls the record; ids may repeat, for example in two files of chats

    @classmethod
    def of_call(cls, prompt: Sequence[Message], *replies: Message, **fields: Any) -> Self:
        return cls(messages=[*prompt, *replies], num_context=len(prompt), **fields)


Level = Literal["call", "trace", "conversation", "any", "record"]


@dataclass(frozen=True, slots=True)
class Rating:
    """One score or thumb."""

    name: str
    value: float | bool | None  # a number, or True for a thumb up; None if it is neither
    level: Level = "call"  # what is rated; any: whatever has that id
    target: str = ""  # the id of that; empty: what else the record holds


@dataclass(frozen=True, slots=True)
class LooseMessage:
    """A message whose conversation, or whose model call, is spread over several records."""

    group: str  # what it belongs to: the conversation or the call
    message: Message
    start: str = ""  # sorts the messages of a group; equal ones stay in the order of the file
    is_reply: bool = False
    """True for the reply of a model call; without any, all assistant messages of the group are trained."""
    trace: str = ""
    conversation: str = ""
    tools: list[dict[str, Any]] | None = None
    ratings: tuple[Rating, ...] = ()  # thumbs and scores of this message; the group then makes a row for each reply
    is_whole: bool = False
    """True if the record holds the whole conversation: records with the same id are not put together."""


@dataclass(frozen=True, slots=True)
class ComparedReplies:
    id: str
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    conversation: str = ""
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class TraceName:
    """Which conversation a trace belongs to, where its model calls do not say."""

    trace: str
    conversation: str


@dataclass(frozen=True, slots=True)
class MissingContent:
    """A model call without messages, which other records may bring; `reason` is why it cannot be read otherwise."""

    id: str
    reason: str


Entry = Exchange | Rating | LooseMessage | ComparedReplies | TraceName | MissingContent


def list_mappings(value: Any) -> list[Record]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def get_text(record: Record, *names: str) -> str:
    return str(next((record[name] for name in names if record.get(name)), ""))


class ExportFormat(ABC):
    """Reads the records of one tool."""

    name: str

    @abstractmethod
    def matches(self, record: Record) -> bool:
        """Returns True if a record looks like one of this tool."""

    def split(self, record: Record) -> Iterator[Record]:
        """Yields the parts of a record: the spans of a batch, the observations of a trace."""
        yield record

    @abstractmethod
    def read(self, part: Record) -> Iterator[Entry]:
        """Yields what a part holds.

        Raises:
            UnreadableRecordError: It cannot be read.
            IgnoredRecordError: It holds nothing to learn from.
        """


def make_sort_key(start: str) -> str:
    """Returns a string that sorts numbers and times in ISO 8601 by their value; any other string unchanged.

    make_sort_key("9") < make_sort_key("10")
    make_sort_key("2026-01-01T09:00:00Z") < make_sort_key("2026-01-01T09:00:00.5Z")
    """
    time = _parse_time(start)
    return start if time is None else f"{time:030.9f}"


def format_time(start: str) -> str | None:
    """Returns a time, or a number of seconds, milli-, micro- or nanoseconds since 1970, in ISO 8601; None: it is none.

    format_time("1767258000.5") == format_time("2026-01-01T10:00:00+01:00") == "2026-01-01T09:00:00Z"
    """
    seconds = _parse_time(start)
    if seconds is None or not EARLIEST_S <= seconds < math.inf:
        return None
    while seconds > LATEST_S:
        seconds /= 1000
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


def is_sortable(start: str) -> bool:
    return _parse_time(start) is not None


def _parse_time(text: str) -> float | None:
    """Returns a number, or the seconds since 1970 of a time in ISO 8601, in UTC if it names no zone; else None."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text.strip().removesuffix(" UTC"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
