"""The checksum of each row of the journal: written with the row, compared when the row is read.

A row that a migration took over from an older format has none until it is written again; only its JSON can be checked.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from reinforge.runs.journal.schema import create_or_upgrade

JSON_COLUMNS = {"data", "value", "ref"}
"""Columns that hold JSON, in every table: an object, or in `value` anything."""

_TYPES: dict[str, tuple[type, ...]] = {"TEXT": (str, bytearray), "INTEGER": (int,), "REAL": (int, float)}


@cache
def read_columns() -> dict[str, dict[str, str]]:
    """Returns the columns of every table but the checksum, with their types: `{"metrics": {"epoch": "INTEGER"}}`.

    They are read from a journal in memory, so that they stand in one place: the schema.
    """
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        create_or_upgrade(db)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {
            table: {
                name: kind
                for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})").fetchall()
                if name != "checksum"
            }
            for table in tables
        }
    finally:
        db.close()


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


def register_checksum(db: sqlite3.Connection) -> None:
    db.create_function("row_checksum", -1, compute_checksum, deterministic=True)


def insert_row(db: sqlite3.Connection, table: str, *, keep_existing: bool = False, **values: Any) -> None:
    """Inserts a row with its checksum; replaces one with the same key.

    Args:
        keep_existing: Do nothing if there is a row with the same key.
        values: By column; the next number for an `id` that is not given, NULL for any other column.
    """
    query = _build_insert(table, "id" in values, keep_existing)
    db.execute(query, {name: _to_sql(values.get(name)) for name in read_columns()[table]})


@cache
def _build_insert(table: str, has_id: bool, keep_existing: bool) -> str:
    columns = read_columns()[table]
    number = f"(SELECT coalesce(max(id), 0) + 1 FROM {table})"
    casts = [
        f"{number} AS id" if name == "id" and not has_id else f"CAST(:{name} AS {kind}) AS {name}"
        for name, kind in columns.items()
    ]
    names, conflict = ", ".join(columns), "IGNORE" if keep_existing else "REPLACE"
    # the checksum is of what SQLite stores: after the conversion to the types of the columns
    row = f"SELECT {names}, row_checksum({names}) FROM (SELECT {', '.join(casts)})"
    return f"INSERT OR {conflict} INTO {table} ({names}, checksum) {row}"


def update_rows(db: sqlite3.Connection, table: str, changes: dict[str, Any], where: str, **parameters: Any) -> None:
    """Changes columns of the rows that a condition selects, and their checksums.

    Args:
        changes: New values by column.
        parameters: Their values; their names are not those of columns.
    """
    columns = read_columns()[table]
    casts = {name: f"CAST(:{name} AS {columns[name]})" for name in changes}
    assignments = ", ".join(f"{name} = {cast}" for name, cast in casts.items())
    row = ", ".join(casts.get(name, name) for name in columns)
    values = {name: _to_sql(value) for name, value in {**changes, **parameters}.items()}
    db.execute(f"UPDATE {table} SET {assignments}, checksum = row_checksum({row}) WHERE {where}", values)


def _to_sql(value: Any) -> Any:
    """Returns text that UTF-8 can hold: lone surrogates become their escapes."""
    if isinstance(value, str) and not value.isascii():
        return value.encode(errors="backslashreplace").decode()
    return value


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One row of a journal that may be damaged.

    Attributes:
        table: Its table.
        values: By column; text as `bytearray`, since it may not be UTF-8.
        checksum: As stored; None: it has none.
        problem: What is wrong with it; None: nothing.
    """

    table: str
    values: dict[str, Any]
    checksum: int | None
    problem: str | None

    @property
    def name(self) -> str:
        """What messages call it, such as `metrics 3`."""
        first = next(iter(self.values.values()))
        return f"{self.table} {first.decode(errors='replace') if isinstance(first, bytearray) else first}"


def check_rows(
    db: sqlite3.Connection, table: str, *, backwards: bool = False, newest: int | None = None
) -> Iterator[CheckedRow]:
    """Yields every row of a table with what is wrong with it.

    Args:
        db: A connection of its own; what it returns for text is changed.
        backwards: From the last key on, which reaches the rows behind a page that cannot be read.
        newest: Only so many rows, those that were written last; the table must have row ids. None: all.

    Raises:
        sqlite3.DatabaseError: A page cannot be read.
    """
    db.text_factory = str
    has_checksums = any(name == "checksum" for _, name, *_ in db.execute(f"PRAGMA table_info({table})").fetchall())
    db.text_factory = bytearray  # text that is no longer UTF-8 must be readable too; a blob stays `bytes`
    names = list(read_columns()[table])
    order = f" ORDER BY {names[0]} DESC" if backwards else ""
    if newest is not None:
        order = f" ORDER BY rowid DESC LIMIT {newest}"
    sealed = "checksum" if has_checksums else "NULL"  # format 2 has the same columns apart from it
    for *row, checksum in db.execute(f"SELECT {', '.join(names)}, {sealed} FROM {table}{order}"):
        values = dict(zip(names, row, strict=True))
        yield CheckedRow(table, values, checksum, find_problem(table, values, checksum))


def find_problem(table: str, values: dict[str, Any], checksum: int | None) -> str | None:
    """Returns what is wrong with a row; None: nothing.

    Args:
        values: By column.
        checksum: As stored; None: only the types and the JSON are checked.
    """
    if checksum is not None:
        return None if checksum == compute_checksum(*values.values()) else "its checksum differs"
    for name, kind in read_columns()[table].items():
        value = values[name]
        if value is not None and not isinstance(value, _TYPES[kind]):
            return f"its {name} is not of type {kind}"
        if value is not None and name in JSON_COLUMNS and not _is_json(values[name], must_be_object=name != "value"):
            return f"its {name} is not JSON"
    return None


def _is_json(text: str | bytearray, *, must_be_object: bool) -> bool:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) or not must_be_object
