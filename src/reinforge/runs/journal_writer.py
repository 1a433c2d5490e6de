"""The thread that writes the journal: what is put together within 50 ms goes into one transaction."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reinforge.crash import crash_point
from reinforge.errors import ConfigError
from reinforge.files import writing

SCHEMA_VERSION = 2
GROUP_COMMIT_S = 0.05
GROUP_COMMIT_MAX = 1000

_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, started_s REAL NOT NULL, pid INTEGER NOT NULL, host TEXT NOT NULL, resumed_after INTEGER,
    ended_s REAL, ended TEXT);
CREATE TABLE stages (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, stage TEXT NOT NULL, at_s REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, epoch INTEGER NOT NULL, run_id TEXT NOT NULL, backend TEXT, status TEXT NOT NULL,
    at_s REAL NOT NULL, ref TEXT, data TEXT) WITHOUT ROWID;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER, checkpoint TEXT,
    at_s REAL NOT NULL);
CREATE TABLE metrics (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE validations (epoch INTEGER PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE snapshots (
    epoch INTEGER PRIMARY KEY, version INTEGER, checkpoint TEXT, at_s REAL NOT NULL, data TEXT NOT NULL);
"""

Work = Callable[[sqlite3.Connection], Any]


class JournalWriter:
    """Writes to one database, in the order of the calls; every commit is a FULL one.

    Args:
        database: The SQLite file; made if it is not there.

    Raises:
        ConfigError: It has the format of another version.
        StorageError: It cannot be written.
    """

    def __init__(self, database: Path):
        self.database = database
        self._queue: queue.SimpleQueue[Work | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()
        self.flush()

    def put(self, work: Work) -> None:
        """Queues some work on the database.

        Raises:
            StorageError: An earlier one could not be written.
        """
        self._raise_if_failed()
        self._queue.put(work)

    def flush(self) -> None:
        """Waits until everything queued so far is on disk.

        Raises:
            StorageError: It could not be written; nothing after the failure is recorded.
        """
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.2):
            if not self._thread.is_alive():
                break
        self._raise_if_failed()

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        self._queue.put(None)
        self._thread.join(timeout=30)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if isinstance(self._error, ConfigError):
            raise self._error
        if self._error is not None:
            with writing(self.database):
                raise self._error

    def _write(self) -> None:
        """The writer thread: everything that is waiting goes into one transaction."""
        waiting: list[threading.Event] = []
        try:
            db = sqlite3.connect(self.database, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found not in (0, SCHEMA_VERSION):
                raise ConfigError(f"{self.database} has the format {found}, this version reads {SCHEMA_VERSION}")
            if found == 0:
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            try:
                while self._write_group(db, waiting):
                    pass
            finally:
                db.close()
        except BaseException as error:  # noqa: BLE001  kept, and raised in the next call of the owner
            self._error = error
        finally:
            for event in waiting:
                event.set()

    def _write_group(self, db: sqlite3.Connection, waiting: list[threading.Event]) -> bool:
        """Commits one group; returns False once the owner closed the store."""
        entry = self._queue.get()
        if entry is None:
            return False
        db.execute("BEGIN IMMEDIATE")
        deadline, goes_on, count = time.monotonic() + GROUP_COMMIT_S, True, 0
        while True:
            if entry is None:
                goes_on = False
                break
            if isinstance(entry, threading.Event):
                waiting.append(entry)
                break
            entry(db)
            count += 1
            try:
                entry = self._next(count, deadline)
            except queue.Empty:
                break
        crash_point("db.before_commit")
        db.execute("COMMIT")
        crash_point("db.after_commit")
        while waiting:
            waiting.pop().set()
        return goes_on

    def _next(self, count: int, deadline: float) -> Any:
        """Returns the group's next entry; `queue.Empty` once the group is full or its time is over."""
        if count >= GROUP_COMMIT_MAX:
            raise queue.Empty
        return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
