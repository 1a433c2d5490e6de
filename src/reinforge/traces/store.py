"""What the records of an export say, in a temporary database, until the calls of a conversation are put together.

The records of one conversation may be anywhere in an export, so nothing can be written before all were read. SQLite
keeps them on disk; in memory there is never more than one trace.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from reinforge.traces.entries import (
    UNREADABLE,
    ComparedReplies,
    Entry,
    Exchange,
    LooseMessage,
    MissingContent,
    Rating,
    TraceName,
    make_sort_key,
)

_SCHEMA = """
PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA temp_store = FILE;
CREATE TABLE exchanges (seq INTEGER PRIMARY KEY, id TEXT, trace TEXT, conversation TEXT, start TEXT, body TEXT,
                        location TEXT, digest BLOB UNIQUE);
CREATE TABLE loose (seq INTEGER PRIMARY KEY, grp TEXT, start TEXT, body TEXT, location TEXT);
CREATE TABLE ratings (seq INTEGER PRIMARY KEY, level TEXT, target TEXT, name TEXT, value REAL, used INTEGER DEFAULT 0);
CREATE TABLE missing (id TEXT, reason TEXT, location TEXT);
CREATE TABLE traces (trace TEXT PRIMARY KEY, conversation TEXT);
"""
_ORDERED = """
SELECT e.conversation, e.trace, e.id, e.start, e.body, e.location, e.seq
FROM exchanges e JOIN (SELECT conversation, MIN(seq) AS place FROM exchanges GROUP BY conversation) c
  ON e.conversation = c.conversation
ORDER BY c.place, e.trace, e.start, e.seq
"""
_ADD_EXCHANGE = """INSERT OR IGNORE INTO exchanges (id, trace, conversation, start, body, location, digest)
                   VALUES (?, ?, ?, ?, ?, ?, ?)"""
_RATINGS = """
SELECT seq, name, value FROM ratings
WHERE (level = 'record' AND target IN (SELECT value FROM json_each(?)))
   OR (level IN ('call', 'any') AND target IN (SELECT value FROM json_each(?)))
   OR (level IN ('trace', 'any') AND target = ?)
   OR (level IN ('conversation', 'any') AND target = ?) ORDER BY seq
"""


StoredExchange = tuple[Exchange | ComparedReplies, str]  # an exchange and where it was read


@dataclass(frozen=True, slots=True)
class RatingSummary:
    name: str
    count: int
    low: float
    high: float
    mean: float
    is_binary: bool  # True if every value is -1, 0 or 1


class CallStore:
    """Keeps entries in a new file and returns them by conversation."""

    def __init__(self, path: Path):
        self._database = sqlite3.connect(path)
        self._database.executescript(_SCHEMA)
        self.num_repeated = 0

    def close(self) -> None:
        self._database.close()

    def add(self, entries: Sequence[Entry], location: str, fallback_id: str) -> None:
        """Adds what one record holds; an exchange without an id gets the fallback."""
        target, level = fallback_id, "call"
        for entry in entries:
            if isinstance(entry, Exchange | ComparedReplies):
                target, level = self._add_exchange(entry, entry.id or fallback_id, location), "record"
            elif isinstance(entry, LooseMessage):
                self._add_loose(entry, location, fallback_id)
            elif isinstance(entry, MissingContent):
                self._database.execute("INSERT INTO missing VALUES (?, ?, ?)", (entry.id, entry.reason, location))
            elif isinstance(entry, TraceName):
                self._database.execute("INSERT OR REPLACE INTO traces VALUES (?, ?)", (entry.trace, entry.conversation))
        for entry in entries:
            if isinstance(entry, Rating) and entry.value is not None:
                rated = (entry.level, entry.target) if entry.target else (level, target)
                self._add_rating(entry.name, entry.value, *rated)

    def _add_loose(self, entry: LooseMessage, location: str, fallback_id: str) -> None:
        group = f"{entry.group or fallback_id}\0{fallback_id if entry.is_whole else ''}"
        conversation = entry.conversation or ((entry.group or fallback_id) if entry.is_whole else "")
        body = (entry.message, entry.is_reply, entry.trace, conversation)
        rated = [(rating.name, rating.value) for rating in entry.ratings]
        values = (group, make_sort_key(entry.start), json.dumps([*body, entry.tools, rated]), location)
        self._database.execute("INSERT INTO loose (grp, start, body, location) VALUES (?, ?, ?, ?)", values)

    def _add_rating(self, name: str, value: float | bool, level: str, target: str) -> None:
        row = (level, target, name, float(value))
        self._database.execute("INSERT INTO ratings (level, target, name, value) VALUES (?, ?, ?, ?)", row)

    def _add_exchange(self, entry: Exchange | ComparedReplies, id_: str, location: str) -> str:
        if isinstance(entry, ComparedReplies):
            trace = start = ""
            body: list[Any] = [entry.prompt, entry.chosen, entry.rejected, entry.tools]
        else:
            trace, start = entry.trace, make_sort_key(entry.start)
            body = [entry.messages, entry.num_context, entry.tools, entry.is_summary]
        text = json.dumps(body)
        digest = hashlib.sha256(f"{id_}\0{trace}\0{text}".encode()).digest()
        values = (id_, trace, entry.conversation, start, text, location, digest)
        added = self._database.execute(_ADD_EXCHANGE, values)
        self.num_repeated += added.rowcount == 0
        return str(self._database.execute("SELECT seq FROM exchanges WHERE digest = ?", (digest,)).fetchone()[0])

    def join_messages(self) -> None:
        """Makes exchanges of the messages that were read one by one."""
        rows = self._database.execute("SELECT grp, body, location FROM loose ORDER BY grp, start, seq")
        for key, found in groupby(rows, key=lambda row: row[0]):
            group = key.rpartition("\0")[0]
            parts = [(json.loads(body), location) for _, body, location in found]
            location = parts[0][1]
            hole = next((number for number, (part, _) in enumerate(parts) if part[0]["role"] == UNREADABLE), len(parts))
            if not (parts := parts[:hole]):
                continue
            messages = [part[0] for part, _ in parts]
            replies = [number for number, (part, _) in enumerate(parts) if part[1]]
            _, _, trace, conversation, tools, _ = parts[0][0]
            if not replies and conversation != group:  # earlier replies in the prompt of a call are not its own
                reason = "the log events of a model call have no gen_ai.choice; export all of its events"
                self._database.execute("INSERT INTO missing VALUES (?, ?, ?)", (group, reason, location))
                continue
            if any(part[5] for part, _ in parts):
                self._add_rated_replies(group, [part for part, _ in parts], location)
                continue
            num_context = replies[0] if replies else 0
            messages = messages[: num_context + 1] if replies else messages
            exchange = Exchange(group, messages, num_context, trace, conversation, tools=tools)
            self._add_exchange(exchange, group, location)
        self._database.execute("DELETE FROM loose")

    def _add_rated_replies(self, group: str, parts: list[Any], location: str) -> None:
        messages = [part[0] for part in parts]
        for number, (message, _, _, conversation, tools, rated) in enumerate(parts):
            id_, record = f"{group}/{number}", ""
            if message["role"] == "assistant":
                exchange = Exchange(id_, messages[: number + 1], number, "", conversation, tools=tools)
                record = self._add_exchange(exchange, id_, location)
            for name, value in rated:
                if value is not None:
                    self._add_rating(name, value, "record", record)  # that of another message counts as unused

    def read_missing(self) -> Iterator[tuple[str, str]]:
        """Yields place and reason of the model calls whose messages no record brought."""
        query = "SELECT location, reason FROM missing WHERE id NOT IN (SELECT id FROM exchanges) ORDER BY rowid"
        yield from self._database.execute(query)

    def read_traces(self) -> Iterator[tuple[str, list[StoredExchange]]]:
        """Yields conversation and exchanges of each trace; those of a conversation one after another.

        An exchange without a trace is alone. If the export names no conversation, it is the trace, or the exchange.
        """
        self._database.executescript(
            """
            UPDATE exchanges SET conversation = COALESCE(
                NULLIF(conversation, ''),
                (SELECT NULLIF(t.conversation, '') FROM traces t WHERE t.trace = exchanges.trace),
                NULLIF(trace, ''), id);
            CREATE INDEX by_conversation ON exchanges (conversation);
            CREATE INDEX by_target ON ratings (target);
            """
        )
        rows = self._database.execute(_ORDERED)
        for _, found in groupby(enumerate(rows), key=lambda row: (row[1][0], row[1][1] or row[0])):
            exchanges = [row for _, row in found]
            yield exchanges[0][0], [_load(*row) for row in exchanges]

    def find_ratings(
        self, records: list[str], calls: list[str], trace: str, conversation: str
    ) -> list[tuple[str, float]]:
        """Returns name and value of each rating of some records or calls, of their trace or of their conversation."""
        targets = json.dumps(records), json.dumps(calls), trace, conversation
        found = self._database.execute(_RATINGS, targets).fetchall()
        self._database.executemany("UPDATE ratings SET used = 1 WHERE seq = ?", [(row[0],) for row in found])
        return [(name, value) for _, name, value in found]

    def count_unused_ratings(self) -> int:
        return int(self._database.execute("SELECT COUNT(*) FROM ratings WHERE used = 0").fetchone()[0])

    def summarize_ratings(self) -> list[RatingSummary]:
        query = """SELECT name, COUNT(*), MIN(value), MAX(value), AVG(value), MIN(value IN (-1, 0, 1))
                   FROM ratings GROUP BY name ORDER BY COUNT(*) DESC, name"""
        rows = self._database.execute(query)
        return [
            RatingSummary(name, count, low, high, mean, bool(binary)) for name, count, low, high, mean, binary in rows
        ]


def _load(conversation: str, trace: str, id_: str, start: str, body: str, location: str, seq: int) -> StoredExchange:
    parts = json.loads(body)
    if isinstance(parts[1], list):
        prompt, chosen, rejected, tools = parts
        return ComparedReplies(id_, prompt, chosen, rejected, conversation, tools), location
    messages, num_context, tools, is_summary = parts
    return Exchange(id_, messages, num_context, trace, conversation, start, tools, is_summary, str(seq)), location
