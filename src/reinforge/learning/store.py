"""The store of `reinforge serve --learn`: chats, feedback, and which versions were trained on which chats.

    chats      one reply of the server: the request without the user's id, the reply, its exact tokens, model, version;
               `split`: seed of the split between two versions that drew its version; null: none did, or it has no user
    calls      what the calls cost whose version a split drew, also those that failed or were cut; no text
    feedback   what one source said of a chat, or of the chats of a session so far; rows are only added
    trainings  version -> chats
    starts     trainings in their order, with the version that each began with, also by the name of its run
    removals   version -> people whose chats it was trained on and were removed since

Ids of users and sessions are kept as hashes (`make_alias`). One thread writes (`JournalWriter`), and what it has
acknowledged is synced to disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from reinforge.bounded import encode_any, load_json
from reinforge.errors import ConfigError, Problem, StorageError, boundary
from reinforge.files import to_json
from reinforge.learning.feedback import JUDGE, Feedback, Opinion
from reinforge.limits import get_limits
from reinforge.routing.live_comparison import LiveCall, LiveScore
from reinforge.runs.journal.episode_json import parse_tokens
from reinforge.runs.journal.reader import open_for_reading
from reinforge.runs.journal.writer import JournalWriter
from reinforge.serving.routes import ApiError
from reinforge.types.request import TokenLogprobs

STORE = "learn.sqlite"
FORMAT = 3
CHAT, SESSION = "chat", "session"
_SCHEMA = """
CREATE TABLE chats (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, id TEXT NOT NULL, conversation TEXT NOT NULL, user TEXT,
    model TEXT NOT NULL, version INTEGER, split INTEGER, started_s REAL NOT NULL, data BLOB NOT NULL, UNIQUE (key, id));
CREATE INDEX chats_by_time ON chats (started_s, key, id, conversation, user, model);
CREATE INDEX chats_by_conversation ON chats (key, conversation);
CREATE INDEX chats_by_user ON chats (key, user);
CREATE INDEX chats_by_split ON chats (split) WHERE split IS NOT NULL;
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, split INTEGER NOT NULL, key TEXT NOT NULL, user TEXT NOT NULL,
    version INTEGER NOT NULL, started_s REAL NOT NULL, seconds REAL, tokens INTEGER, is_error INTEGER NOT NULL);
CREATE INDEX calls_by_split ON calls (split);
CREATE INDEX calls_by_user ON calls (key, user);
CREATE TABLE feedback (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, level TEXT NOT NULL, target TEXT NOT NULL,
    until INTEGER NOT NULL, source TEXT NOT NULL, data TEXT NOT NULL, request_key TEXT, digest TEXT NOT NULL,
    at_s REAL NOT NULL, UNIQUE (key, request_key));
CREATE INDEX feedback_by_target ON feedback (key, level, target);
CREATE TABLE trainings (version TEXT NOT NULL, key TEXT NOT NULL, chat TEXT NOT NULL, PRIMARY KEY (key, chat, version));
CREATE TABLE starts (seq INTEGER PRIMARY KEY AUTOINCREMENT, version TEXT NOT NULL, base TEXT NOT NULL,
    at_s REAL NOT NULL);
CREATE TABLE removals (version TEXT NOT NULL, key TEXT NOT NULL, user TEXT NOT NULL, PRIMARY KEY (key, user, version));
"""
MAX_FEEDBACK = 100
"""Most feedback on one chat or one session, so that a client cannot fill the disk."""
MAX_REPLIES = 100
"""Most replies, the newest with feedback, that the score of one conversation is the mean of."""
T = TypeVar("T")


def make_alias(key: str, kind: str, name: str) -> str:
    """Returns what the store calls a user or a session of the clients with an API key."""
    return hashlib.sha256(encode_any(f"{key}\0{kind}\0{name}")).hexdigest()[:32]


def create_tables(db: sqlite3.Connection, database: Path) -> None:
    """Makes the tables of an empty store; what is deleted from it is overwritten."""
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA busy_timeout = 60000")  # `reinforge learn export` writes, too, for a moment
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    elif found != FORMAT:
        raise ConfigError(
            f"{database} has format {found}, and this reinforge reads format {FORMAT}: use another folder"
        )


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A chat with what is said of it now.

    Attributes:
        owner: The user of its conversation, else the conversation: what must not be in two splits.
        is_trained: A version was trained on it.
        record: In the form of LiteLLM's logs.
        tokens: The exact tokens of the reply; None: what was removed from the texts is not in them either.
        opinions: By source; that of the chat before that of its session, field by field.
    """

    seq: int
    started_s: float
    key: str
    id: str
    conversation: str
    owner: str
    is_trained: bool
    model: str
    version: int | None
    record: dict[str, Any]
    tokens: TokenLogprobs | None
    opinions: dict[str, Opinion]

    @property
    def labels(self) -> set[bool]:
        return {each["label"] for each in self.opinions.values() if "label" in each}

    @property
    def correction(self) -> str | None:
        """The newest one."""
        return next((each["correction"] for each in reversed(self.opinions.values()) if "correction" in each), None)


class LearningStore:
    """The store that this process writes to. Methods but `add` and `add_chat` block until it is on disk."""

    def __init__(self, database: Path):
        self.database, self.num_bytes = database, 0
        self.compares_judged = False  # the scores of comparisons are also the judge's
        self._writer = JournalWriter(database, create_tables)
        self.run(self._measure)

    def close(self) -> None:
        self._writer.close()

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Returns what work on the database returns, once it is on disk; its exceptions must come before it writes.

        Raises:
            StorageError: It, or what came before it, cannot be written; nothing more is.
        """
        found = Future[T]()

        def carry(db: sqlite3.Connection) -> None:
            try:
                found.set_result(work(db))
            except sqlite3.Error:
                raise
            except Exception as error:  # noqa: BLE001  raised below, where it belongs
                found.set_exception(error)

        self._writer.put(carry)
        self._writer.flush()
        return found.result()

    def add_chat(self, row: Mapping[str, Any], record: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> None:
        """Queues a chat; `row` has the columns but `data`, `tokens` what `dump_tokens` returns."""
        text = to_json({"record": record, "tokens": tokens})
        self.add("chats", {**row, "data": zstandard.ZstdCompressor(level=3).compress(text.encode())})

    def add(self, table: str, values: Mapping[str, Any]) -> None:
        """Queues a row."""
        names = ", ".join(values)
        query = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in values)})"

        def insert(db: sqlite3.Connection) -> None:
            db.execute(query, values)
            self._measure(db)

        self._writer.put(insert)

    def _measure(self, db: sqlite3.Connection) -> None:
        used, free, size = (db.execute(f"PRAGMA {each}").fetchone()[0] for each in _SIZES)
        self.num_bytes = (used - free) * size

    def add_feedback(self, key: str, given: Feedback, opinion: Opinion, max_bytes: float) -> dict[str, Any]:
        """Keeps feedback of the clients with an API key, and returns the answer to them.

        Args:
            opinion: What of `given.opinion` may be kept.
            max_bytes: Size of the store from which on nothing is kept.

        Raises:
            ApiError: The chat is unknown, or the feedback is refused; nothing has changed.
        """
        level, name, column = (CHAT, given.id, "id") if given.id else (SESSION, given.session_id, "conversation")
        target = str(name) if level == CHAT else make_alias(key, "session", str(name))
        data, whose = to_json(opinion), (key, level, target)
        digest = hashlib.sha256(to_json([*whose, given.source, data]).encode()).hexdigest()

        def add(db: sqlite3.Connection) -> dict[str, Any]:
            query = "SELECT seq, digest FROM feedback WHERE key = ? AND request_key = ?"
            if (known := db.execute(query, (key, given.key)).fetchone()) is not None:
                if known[1] != digest:
                    message = f"other feedback was sent with the key {given.key!r}; send a new key"
                    raise ApiError(409, message, param="key", code="idempotency_key_reused")
                return _answer(known[0], is_new=False)
            query = f"SELECT max(seq) FROM chats WHERE key = ? AND {column} = ?"
            (until,) = db.execute(query, (key, target)).fetchone()
            if until is None:
                message = (
                    f"no {level} {name!r} is kept for this API key: it is unknown, was not recorded, or was deleted"
                )
                raise ApiError(404, message, param="id" if level == CHAT else "session_id", code="chat_not_found")
            query = "SELECT count(*), max(seq) FROM feedback WHERE key = ? AND level = ? AND target = ?"
            count, newest = db.execute(query, whose).fetchone()
            now = read_opinions(db, *whose, until).get(given.source)
            if given.key is None and now is not None and now | opinion == now:
                return _answer(newest, is_new=False)
            if count >= MAX_FEEDBACK:
                message = f"this {level} has {count} times feedback, which is the limit"
                raise ApiError(409, message, code="too_much_feedback")
            if self.num_bytes >= max_bytes:
                raise ApiError(507, "the store is full; nothing was kept", code="store_full")
            row = (*whose, until, given.source, data, given.key, digest, time.time())
            names = "key, level, target, until, source, data, request_key, digest, at_s"
            added = db.execute(f"INSERT INTO feedback ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._measure(db)
            return _answer(added.lastrowid, is_new=True)

        return self.run(add)

    def read_scores(self, key: str | None = None, given: Feedback | None = None) -> list[LiveScore]:
        """Returns the scores of conversations in comparisons: of those that feedback is on; None: of all."""
        read_scores = partial(_read_scores, judged=self.compares_judged)
        if given is None:
            return self.run(read_scores)
        if given.id is None:
            return self.run(lambda db: read_scores(db, key, make_alias(str(key), "session", str(given.session_id))))
        query = "SELECT conversation FROM chats WHERE key = ? AND id = ?"

        def read(db: sqlite3.Connection) -> list[LiveScore]:
            found = db.execute(query, (key, given.id)).fetchone()
            return [] if found is None else read_scores(db, key, *found)

        return self.run(read)

    def read_calls(self, splits: Collection[int], after: int) -> tuple[list[LiveCall], int]:
        """Returns the calls of splits after the one with a number, and the number of the newest of them."""
        columns, marks = "seq, split, user, version, seconds, tokens, is_error", ", ".join("?" * len(splits))
        query = f"SELECT {columns} FROM calls WHERE split IN ({marks}) AND seq > ? ORDER BY seq"
        rows = self.run(lambda db: db.execute(query, (*splits, after)).fetchall())
        return [LiveCall(*row[1:]) for row in rows], rows[-1][0] if rows else after

    def remove_before(self, started_s: float) -> bool:
        """Deletes older chats, what is said of them, and older calls; returns whether there were any chats."""

        def remove(db: sqlite3.Connection) -> int:
            count = db.execute("DELETE FROM chats WHERE started_s < ?", (started_s,)).rowcount
            db.execute("DELETE FROM calls WHERE started_s < ?", (started_s,))
            _remove_orphans(db)
            self._measure(db)
            return count

        if is_changed := self.run(remove) > 0:
            self._empty_log()
        return is_changed

    def remove_user(self, key: str, user: str) -> dict[str, Any]:
        """Deletes the conversations of a person and what is said of them.

        Returns:
            `chats`, `feedback`: how many were deleted; `versions`: those that were trained on any of them, also on ones
            that were deleted by an earlier call.
        """
        whose = (key, user)

        def remove(db: sqlite3.Connection) -> dict[str, Any]:
            theirs = "key = ?1 AND conversation IN (SELECT conversation FROM chats WHERE key = ?1 AND user = ?2)"
            db.execute(
                "INSERT OR IGNORE INTO removals SELECT DISTINCT version, ?1, ?2 FROM trainings WHERE key = ?1 AND "
                f"chat IN (SELECT id FROM chats WHERE {theirs})",
                whose,
            )
            num_chats = db.execute(f"DELETE FROM chats WHERE {theirs}", whose).rowcount
            db.execute("DELETE FROM calls WHERE key = ? AND user = ?", whose)
            num_feedback = _remove_orphans(db)
            self._measure(db)
            query = "SELECT version FROM removals WHERE key = ? AND user = ? ORDER BY version"
            versions = [version for (version,) in db.execute(query, whose)]
            return {"chats": num_chats, "feedback": num_feedback, "versions": versions}

        found = self.run(remove)
        self._empty_log()
        return found

    def record_training(self, version: str, chats: Sequence[tuple[str, str]], base: str | None = None) -> None:
        """Records the keys and ids of the chats that a version is trained on; with a base: that this begins now."""
        rows = [(version, *chat) for chat in chats]

        def record(db: sqlite3.Connection) -> None:
            db.executemany("INSERT OR IGNORE INTO trainings VALUES (?, ?, ?)", rows)
            if base is not None:
                db.execute("INSERT INTO starts (version, base, at_s) VALUES (?, ?, ?)", (version, base, time.time()))

        self.run(record)

    def count(self, key: str) -> dict[str, int]:
        tables = {"chats": "chats", "feedback": f"feedback WHERE source != '{JUDGE}'"}
        tables["judged"] = f"feedback WHERE source = '{JUDGE}'"

        def count(db: sqlite3.Connection) -> dict[str, int]:
            return {
                name: db.execute(f"SELECT count(*) FROM (SELECT * FROM {table}) WHERE key = ?", (key,)).fetchone()[0]
                for name, table in tables.items()
            }

        return self.run(count)

    def _empty_log(self) -> None:
        """Moves the write-ahead log into the file, so that the log holds nothing that was deleted; not during reads."""
        with contextlib.closing(sqlite3.connect(self.database)) as db, contextlib.suppress(sqlite3.OperationalError):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


_SIZES = ("page_count", "freelist_count", "page_size")


def _answer(seq: int | None, *, is_new: bool) -> dict[str, Any]:
    return {"id": f"feedback-{seq}", "object": "feedback", "is_new": is_new}


def _remove_orphans(db: sqlite3.Connection) -> int:
    """Deletes feedback on chats and sessions that are gone; returns how much."""
    return db.execute(
        f"DELETE FROM feedback WHERE (level = '{CHAT}' AND (key, target) NOT IN (SELECT key, id FROM chats)) OR "
        f"(level = '{SESSION}' AND (key, target) NOT IN (SELECT key, conversation FROM chats))"
    ).rowcount


def read_opinions(db: sqlite3.Connection, key: str, level: str, target: str, seq: int) -> dict[str, Opinion]:
    """Returns what each source says now of a chat, or of a session that had the chat with number `seq`.

    {"label": True}, {"comment": "late"}, {"label": None}  =>  {"label": None, "comment": "late"}
    """
    opinions: dict[str, Opinion] = {}
    query = "SELECT source, data FROM feedback WHERE key = ? AND level = ? AND target = ? AND until >= ? ORDER BY seq"
    for source, data in db.execute(query, (key, level, target, seq)):
        opinions[source] = opinions.pop(source, {}) | json.loads(data)  # the newest source last
    return opinions


_FEEDBACK = "coalesce((SELECT max(seq) FROM feedback AS f WHERE f.key = c.key AND f.level = '%s' AND f.target = %s), 0)"
_NEWEST = f"max({_FEEDBACK % (CHAT, 'c.id')}, {_FEEDBACK % (SESSION, 'c.conversation AND f.until >= c.seq')})"
_RATED = f"{_NEWEST} > 0"
TRAINED = "EXISTS (SELECT 1 FROM trainings AS t WHERE t.key = c.key AND t.chat = c.id)"
_OWNER = (
    "coalesce((SELECT max(user) FROM chats AS o WHERE o.key = c.key AND o.conversation = c.conversation), conversation)"
)


def _merge_opinions(db: sqlite3.Connection, key: str, id_: str, conversation: str, seq: int) -> dict[str, Opinion]:
    """Returns what each source says now of a chat: of itself before of its session, without what is taken back."""
    of_session = read_opinions(db, key, SESSION, conversation, seq)
    of_chat = read_opinions(db, key, CHAT, id_, seq)
    opinions = {}
    for source in (*(each for each in of_session if each not in of_chat), *of_chat):
        merged = of_session.get(source, {}) | of_chat.get(source, {})
        opinions[source] = {name: value for name, value in merged.items() if value is not None}
    if any(each.keys() - {"comment"} for source, each in opinions.items() if source != JUDGE):
        opinions.pop(JUDGE, None)
    return opinions


def compute_score(opinions: Iterable[Opinion]) -> float | None:
    """Returns the score of a reply in [0, 1]: the mean over its sources; None: none of them has one.

    Example: {"label": True}, {"label": True, "score": 0.5}, {"score": 7} -> 0.75.
    """
    said = [float(each["score"] if "score" in each else each.get("label", -1)) for each in opinions]
    found = [each for each in said if 0 <= each <= 1]
    return sum(found) / len(found) if found else None


def _read_scores(db: sqlite3.Connection, *whose: str | None, judged: bool = False) -> list[LiveScore]:
    """Returns the scores in [0, 1] of conversations: the means of their replies, which are the means of their sources.

    They are in the order of their newest feedback.

    Args:
        whose: Key and alias of one conversation; none: of all.
        judged: The judge is a source as well.
    """
    where = f"{_RATED} AND split IS NOT NULL" + (" AND key = ? AND conversation = ?" if whose else "")
    order = "row_number() OVER (PARTITION BY split, key, conversation ORDER BY seq DESC) AS place"
    columns = "seq, key, id, conversation, user, split, version"
    chats = f"SELECT {columns}, {_NEWEST} AS newest, {order} FROM chats AS c WHERE {where}"
    query = f"SELECT {columns} FROM ({chats}) WHERE place <= ? ORDER BY newest"
    scores: dict[tuple[int, str], tuple[str, int, list[float]]] = {}
    for seq, key, id_, conversation, user, split, version in db.execute(query, (*whose, MAX_REPLIES)).fetchall():
        opinions = _merge_opinions(db, key, id_, conversation, seq)
        counted = [each for source, each in opinions.items() if judged or source != JUDGE]
        scores[split, conversation] = scores.pop((split, conversation), (user, version, []))  # moves to the end
        if (score := compute_score(counted)) is not None:
            scores[split, conversation][2].append(score)
    return [
        LiveScore(*place, user, version, sum(replies) / len(replies) if replies else None)
        for place, (user, version, replies) in scores.items()
    ]


@contextlib.contextmanager
def open_store(database: Path) -> Iterator[sqlite3.Connection]:
    with boundary(StorageError, f"cannot read {database}"), open_for_reading(database) as db:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found != FORMAT:
            raise ConfigError(f"{database} is not a store of `reinforge serve --learn` (format {found})")
        yield db


def read_last_start(database: Path) -> float | None:
    """Returns when the newest training began, in seconds since the Unix epoch; None: there was none."""
    with open_store(database) as db:
        found = db.execute("SELECT at_s FROM starts ORDER BY seq DESC LIMIT 1").fetchone()
    return None if found is None else float(found[0])


def find_person(database: Path, user: str) -> tuple[set[tuple[str, str]], set[str]]:
    """Returns a person's conversations, of any API key, and what was trained on any of them, also on deleted ones.

    A version that began with one of these is one of them.
    """
    conversations, versions = set[tuple[str, str]](), set[str]()
    trained = (
        "SELECT version FROM removals WHERE key = ?1 AND user = ?2 UNION SELECT t.version FROM trainings AS t JOIN "
        "chats AS c ON c.key = t.key AND c.id = t.chat WHERE c.key = ?1 AND c.conversation IN (SELECT conversation "
        "FROM chats WHERE key = ?1 AND user = ?2)"
    )
    with open_store(database) as db:
        for (key,) in db.execute("SELECT key FROM chats UNION SELECT key FROM removals").fetchall():
            whose = (key, make_alias(key, "user", user))
            found = db.execute("SELECT DISTINCT key, conversation FROM chats WHERE key = ? AND user = ?", whose)
            conversations |= set(found.fetchall())
            versions |= {version for (version,) in db.execute(trained, whose)}
        for version, base in db.execute("SELECT version, base FROM starts ORDER BY seq"):
            versions |= {version} if base in versions else set()
    if not conversations and not versions:
        fix = "write it as requests do, in `user`; nothing was trained on what is not kept"
        raise ConfigError(Problem("USER", f"no request of the user {user!r} is kept in {database}", fix))
    return conversations, versions


def read_chats(
    database: Path, *, only_new: bool = False, judged: bool = True, since_s: float = 0.0
) -> Iterator[StoredChat]:
    """Yields the chats of a store in their order; a server may write to it at the same time.

    Args:
        only_new: Only those with feedback that no version was trained on.
        judged: With what the judge says.
        since_s: Only those that began then or later, in seconds since the Unix epoch.
    """
    where = "started_s >= ?" + (f" AND {_RATED} AND NOT {TRAINED}" if only_new else "")
    for chat in _read_where(database, where, since_s):
        if not judged:
            chat.opinions.pop(JUDGE, None)
        if chat.opinions or not only_new:
            yield chat


def read_unrated(database: Path, after: int) -> Generator[StoredChat]:
    """Yields the chats without feedback, from those after a number on."""
    yield from _read_where(database, f"NOT {_RATED} AND seq > ?", after)


def _read_where(database: Path, where: str, *values: float) -> Iterator[StoredChat]:
    with open_store(database) as db:
        columns = f"seq, started_s, key, id, conversation, {_OWNER}, {TRAINED}, model, version, data"
        rows = db.execute(f"SELECT {columns} FROM chats AS c WHERE {where} ORDER BY seq", values)
        for seq, started_s, key, id_, conversation, owner, is_trained, model, version, packed in rows:
            text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=8 * get_limits().episode_chars)
            data = load_json(text)
            opinions = _merge_opinions(db, key, id_, conversation, seq)
            tokens = None if data["tokens"] is None else parse_tokens(data["tokens"])
            facts = (seq, started_s, key, id_, conversation, owner, bool(is_trained), model, version)
            yield StoredChat(*facts, data["record"], tokens, opinions)
