"""The record of uploaded files, of uploads in parts, and of the requests that a client may send again."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError
from reinforge.files import open_private, storage_boundary
from reinforge.protocols.openai.server.records import FileRecord, UploadRecord

FORMAT = 1
_TABLES = """
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, sha256 TEXT NOT NULL,
    expires_at INTEGER);
CREATE TABLE uploads (id TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, status TEXT NOT NULL, file_id TEXT,
    expires_after INTEGER) WITHOUT ROWID;
CREATE TABLE parts (id TEXT PRIMARY KEY, upload_id TEXT NOT NULL, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
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
    """The file, created if there is none; its methods may be called from any thread."""

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
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
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
        """Returns a page of a table and whether there are more rows; the names come from this file alone."""
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


RETRY_S = 600.0  # seconds for which a client's retry is recognized by its body


class FileStore(Database):
    def add_file(self, file: FileRecord, digest: str | None = None) -> None:
        """Records a file whose content is on disk; `digest` recognizes a retry of its upload."""
        with self._transaction() as database:
            insert(database, "files", asdict(file))
            self._remember(database, digest, file.id)

    def find_file(self, id_: str) -> FileRecord:
        """Returns a file whose time is not over."""
        alive = "expires_at IS NULL OR expires_at >= ?"
        rows = self._read(f"SELECT * FROM files WHERE id = ? AND ({alive})", id_, int(time.time()))
        if not rows:
            raise UnknownObject(f"there is no file {id_[:80]!r}")
        return _read_file(rows[0])

    def find_repeated(self, digest: str) -> str | None:
        """Returns the id of what the same request has made within `RETRY_S`; None: nothing."""
        rows = self._read(
            "SELECT object_id FROM requests WHERE key = ? AND at_s > ?", f"digest:{digest}", time.time() - RETRY_S
        )
        return str(rows[0]["object_id"]) if rows else None

    def list_files(
        self, after: str | None, limit: int, purpose: str | None = None, *, oldest_first: bool = False
    ) -> tuple[list[FileRecord], bool]:
        where = "" if purpose is None else " AND purpose = ?"
        values = () if purpose is None else (purpose,)
        rows, more = self._read_page("files", f"1{where}", values, after, limit, oldest_first=oldest_first)
        return [_read_file(row) for row in rows], more

    def list_expired_files(self) -> list[FileRecord]:
        return [_read_file(row) for row in self._read("SELECT * FROM files WHERE expires_at < ?", int(time.time()))]

    def remove_file(self, id_: str) -> None:
        with self._transaction() as database:
            if not database.execute("DELETE FROM files WHERE id = ?", (id_,)).rowcount:
                raise UnknownObject(f"there is no file {id_[:80]!r}")
            database.execute("DELETE FROM requests WHERE object_id = ?", (id_,))

    def count_bytes(self) -> int:
        """Returns the size of all files, and of the uploads that are not completed, as they were announced."""
        stored = "SELECT coalesce(sum(num_bytes), 0) FROM files"
        announced = "SELECT coalesce(sum(num_bytes), 0) FROM uploads WHERE status = 'pending'"
        return int(self._read(f"SELECT ({stored}) + ({announced}) AS n")[0]["n"])

    def add_upload(self, upload: UploadRecord, digest: str | None = None) -> None:
        """Records an upload that begins; `digest` recognizes a retry of its request."""
        with self._transaction() as database:
            insert(database, "uploads", asdict(upload))
            self._remember(database, digest, upload.id)

    def find_upload(self, id_: str) -> UploadRecord:
        """Returns an upload; a pending one whose time is over is `expired`."""
        rows = self._read("SELECT * FROM uploads WHERE id = ?", id_)
        if not rows:
            raise UnknownObject(f"there is no upload {id_[:80]!r}")
        upload = UploadRecord(**dict(rows[0]))
        is_over = upload.status == "pending" and upload.expires_at < time.time()
        return replace(upload, status="expired") if is_over else upload

    def end_upload(self, id_: str, status: str, file: FileRecord | None = None) -> None:
        """Completes an upload with its file, or cancels it; its parts are forgotten."""
        with self._transaction() as database:
            changed = database.execute(
                "UPDATE uploads SET status = ?, file_id = ? WHERE id = ? AND status = 'pending'",
                (status, None if file is None else file.id, id_),
            )
            if not changed.rowcount:
                raise UnknownObject(f"the upload {id_[:80]!r} is not pending")
            database.execute("DELETE FROM parts WHERE upload_id = ?", (id_,))
            if file is not None:
                insert(database, "files", asdict(file))

    def list_expired_uploads(self) -> list[str]:
        rows = self._read("SELECT id FROM uploads WHERE status = 'pending' AND expires_at < ?", int(time.time()))
        return [row["id"] for row in rows]

    def add_part(self, id_: str, upload_id: str, num_bytes: int, digest: str | None = None) -> bool:
        """Records a part whose content is on disk; returns False instead if it makes the upload too long."""
        with self._transaction() as database:
            upload = self.find_upload(upload_id)
            if upload.status != "pending":
                raise UnknownObject(f"the upload {upload_id[:80]!r} is {upload.status}")
            if sum(self.list_parts(upload_id).values()) + num_bytes > upload.num_bytes:
                return False
            insert(database, "parts", {"id": id_, "upload_id": upload_id, "num_bytes": num_bytes})
            self._remember(database, digest, id_)
            return True

    def list_parts(self, upload_id: str) -> dict[str, int]:
        return {row["id"]: row["num_bytes"] for row in self._read("SELECT * FROM parts WHERE upload_id = ?", upload_id)}

    def list_part_ids(self) -> set[str]:
        return {row["id"] for row in self._read("SELECT id FROM parts")}

    @staticmethod
    def _remember(database: sqlite3.Connection, digest: str | None, object_id: str, key: str | None = None) -> None:
        if digest is not None:
            values = {"key": key or f"digest:{digest}", "digest": digest, "object_id": object_id, "at_s": time.time()}
            insert(database, "requests", values, "INSERT OR REPLACE")


def _read_file(row: sqlite3.Row) -> FileRecord:
    return FileRecord(**{name: row[name] for name in FileRecord.__dataclass_fields__})


def insert(database: sqlite3.Connection, table: str, values: Mapping[str, Any], how: str = "INSERT") -> None:
    """Adds a row; the names of the table and its columns come from this package alone."""
    marks = ", ".join("?" * len(values))
    database.execute(f"{how} INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
