"""The SQLite file of the fine-tuning API: its tables, and transactions that are synced to disk before they return."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError
from reinforge.files import open_private, storage_boundary

FORMAT = 1
_TABLES = """
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, sha256 TEXT NOT NULL,
    expires_at INTEGER);
CREATE TABLE uploads (id TEXT PRIMARY KEY, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, status TEXT NOT NULL, file_id TEXT,
    expires_after INTEGER) WITHOUT ROWID;
CREATE TABLE parts (id TEXT PRIMARY KEY, upload_id TEXT NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created_at INTEGER NOT NULL,
    state TEXT NOT NULL, metadata TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job_id TEXT NOT NULL,
    created_at INTEGER NOT NULL, level TEXT NOT NULL, message TEXT NOT NULL, data TEXT);
CREATE INDEX events_by_job ON events (job_id, number);
CREATE TABLE checkpoints (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, job_id TEXT NOT NULL,
    created_at INTEGER NOT NULL, step INTEGER NOT NULL, model TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE models (name TEXT PRIMARY KEY, base TEXT NOT NULL, folder TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (key TEXT PRIMARY KEY, digest TEXT NOT NULL, object_id TEXT NOT NULL, at_s REAL NOT NULL)
    WITHOUT ROWID;
"""


class UnknownObject(Exception):
    """There is no file, upload, job or model with an id."""


class Database:
    """The file; its methods may be called from any thread.

    Args:
        path: The file; created if there is none.

    Raises:
        StorageError: It cannot be opened, or was written by a newer version.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.RLock()
        with storage_boundary(path):
            open(path, "ab", opener=open_private).close()
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            found = self._database.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                with self._transaction() as database:
                    for statement in _TABLES.strip().split(";\n"):
                        database.execute(statement.rstrip(";"))
                    database.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.Error as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        if found not in (0, FORMAT):
            raise StorageError(f"{path} has format {found}, which this version cannot read; it writes {FORMAT}")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Yields the database inside one transaction, which is synced to disk at its end."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise StorageError(f"{self.path} cannot be written: {error}") from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _read_page(
        self,
        table: str,
        where: str,
        values: tuple[Any, ...],
        after: str | None,
        limit: int,
        *,
        oldest_first: bool = False,
    ) -> tuple[list[sqlite3.Row], bool]:
        """Returns a page of a table and whether there are more rows; the names come from this file alone.

        Raises:
            UnknownObject: The row after which the page begins does not exist.
        """
        order, comes_after = ("ASC", ">") if oldest_first else ("DESC", "<")
        with self._lock:
            if after is not None:
                found = self._read(f"SELECT number FROM {table} WHERE id = ?", after)
                if not found:
                    raise UnknownObject(f"after: there is no {after[:80]!r}")
                where, values = f"{where} AND number {comes_after} ?", (*values, found[0]["number"])
            rows = self._read(
                f"SELECT * FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?", *values, limit + 1
            )
        return rows[:limit], len(rows) > limit


def make_id(prefix: str) -> str:
    """Returns a new id: the prefix and 24 hexadecimal digits."""
    return f"{prefix}-{secrets.token_hex(12)}"
