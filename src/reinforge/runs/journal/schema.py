"""The tables of the journal (`run.sqlite`), and the checksum of each row, compared when the row is read.

`PRAGMA user_version` holds the format. 0 is an empty file: its process died before it had created the tables.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reinforge.bounded import escape_surrogates
from reinforge.errors import ConfigError

SCHEMA_VERSION = 3

JSON_COLUMNS = {"data", "value", "ref"}  # columns that hold JSON, in every table

_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, started_s REAL NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, resumed_after INTEGER,
    ended_s REAL, ended TEXT, checksum INTEGER);
CREATE TABLE stages (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, stage TEXT NOT NULL, at_s REAL NOT NULL, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, run_id TEXT NOT NULL, backend TEXT, status TEXT NOT NULL,
    at_s REAL NOT NULL, ref TEXT, data TEXT, checksum INTEGER) WITHOUT ROWID;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL, checksum INTEGER);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER, checkpoint TEXT,
    at_s REAL NOT NULL, checksum INTEGER);
CREATE TABLE metrics (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE validations (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL, checksum INTEGER);
CREATE TABLE snapshots (
    epoch INTEGER PRIMARY KEY, version INTEGER, checkpoint TEXT, at_s REAL NOT NULL, data TEXT NOT NULL, checksum INTEGER);
"""  # noqa: E501

_CONVERT = {"TEXT": str, "INTEGER": int, "REAL": float}


def describe_format(database: Path, found: int) -> str:
    fix = "upgrade reinforge" if found > SCHEMA_VERSION else "start a new run"
    return f"{database} has format {found}, and this reinforge reads format {SCHEMA_VERSION}: {fix}"


def create_tables(db: sqlite3.Connection, database: Path | None = None) -> None:
    """Makes the tables of an empty journal in one transaction; does nothing if they exist.

    Args:
        db: A connection in autocommit mode.
        database: The SQLite file, for messages; None: it is in memory.
    """
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif found != SCHEMA_VERSION:
        raise ConfigError(describe_format(database or Path(), found))


def read_tables(db: sqlite3.Connection) -> dict[str, str]:
    return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())


@cache
def read_columns() -> dict[str, dict[str, str]]:
    """Returns the columns of every table but the checksum, with their types: `{"metrics": {"epoch": "INTEGER"}}`.

    The first column is the key. They are read from a journal in memory, so that only the schema defines them.
    """
    db = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(db)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    found = {}
    for table in tables:
        rows = db.execute(f"PRAGMA table_info({table})").fetchall()
        found[table] = {name: kind for _, name, kind, *_ in rows if name != "checksum"}
    db.close()
    return found


def compute_checksum(*values: Any) -> int:
    """Returns the CRC-32 of the values of a row, as SQLite returns them; a `bytearray` is text that was not decoded."""
    checksum = 0
    for value in values:
        if value is None:
            head, body = b"null", b""
        elif isinstance(value, int):
            head, body = b"integer", b"%d" % value
        elif isinstance(value, float):
            head, body = b"real", struct.pack("<d", value + 0.0)  # SQLite has no negative zero
        else:
            head = b"blob" if isinstance(value, bytes) else b"text"
            body = value.encode() if isinstance(value, str) else bytes(value)
        checksum = zlib.crc32(body, zlib.crc32(b"%s %d:" % (head, len(body)), checksum))
    return checksum


def insert_row(db: sqlite3.Connection, table: str, *, keep_existing: bool = False, **values: Any) -> None:
    """Inserts a row with its checksum; replaces one with the same key.

    Args:
        keep_existing: Do nothing if there is a row with the same key.
        values: By column; the next number for an `id` that is not given, NULL for any other column.
    """
    columns = read_columns()[table]
    if "id" in columns and "id" not in values:
        [values["id"]] = db.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()
    row = [_to_sql(values.get(name), kind) for name, kind in columns.items()]
    places, conflict = ", ".join("?" * (len(row) + 1)), "IGNORE" if keep_existing else "REPLACE"
    query = f"INSERT OR {conflict} INTO {table} ({', '.join(columns)}, checksum) VALUES ({places})"
    db.execute(query, (*row, compute_checksum(*row)))


def update_rows(db: sqlite3.Connection, table: str, changes: dict[str, Any], where: str, **parameters: Any) -> None:
    """Changes columns, but not the key, of the rows that a condition with parameters selects, and their checksums."""
    names = list(read_columns()[table])
    for row in db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {where}", parameters).fetchall():
        insert_row(db, table, **{**dict(zip(names, row, strict=True)), **changes})


def _to_sql(value: Any, kind: str) -> Any:
    """Returns a value as SQLite stores it, since the checksum is of that; lone surrogates become their escapes."""
    if value is None or value != value:  # SQLite has no NaN
        return None
    converted = _CONVERT[kind](value)
    return escape_surrogates(converted) if kind == "TEXT" else converted


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One row of a journal that may be damaged."""

    table: str
    values: dict[str, Any]  # by column; text as `bytearray`, since it may not be UTF-8
    problem: str | None  # what is wrong with it; None: nothing

    @property
    def name(self) -> str:
        """What messages call it, such as `metrics 3`."""
        first = next(iter(self.values.values()))
        return f"{self.table} {first.decode(errors='replace') if isinstance(first, bytearray) else first}"


def check_rows(
    db: sqlite3.Connection, table: str, *, backwards: bool = False, newest: int | None = None
) -> Iterator[CheckedRow]:
    """Yields every row of a table with what is wrong with it, until a page cannot be read.

    Args:
        db: A connection of its own; what it returns for text is changed.
        backwards: From the last key on, which reaches the rows behind a page that cannot be read.
        newest: Only so many rows, those that were written last; None: all.
    """
    db.text_factory = bytearray  # text that is no longer UTF-8 must be readable too; a blob stays `bytes`
    names = list(read_columns()[table])
    order = f" ORDER BY {names[0]} DESC" if backwards else ""
    if newest is not None:
        order = f" ORDER BY rowid DESC LIMIT {newest}"
    for *row, checksum in db.execute(f"SELECT {', '.join(names)}, checksum FROM {table}{order}"):
        yield CheckedRow(table, dict(zip(names, row, strict=True)), find_problem(row, checksum))


def find_problem(row: list[Any], checksum: int) -> str | None:
    return None if checksum == compute_checksum(*row) else "its checksum differs"
