"""The thread that writes the journal: everything queued within 50 ms goes into one transaction."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reinforge.crash import crash_point
from reinforge.errors import ConfigError
from reinforge.files import PRIVATE_FILE, open_private, storage_boundary
from reinforge.runs.journal.reader import DAMAGE_MARK, DATABASE_ERRORS, is_damage
from reinforge.runs.journal.schema import create_tables

GROUP_COMMIT_S = 0.05
GROUP_COMMIT_MAX = 1000

Work = Callable[[sqlite3.Connection], Any]


class JournalWriter:
    """Writes to one database, whose tables `create` makes, in the order of the calls; commits are synced to disk."""

    def __init__(self, database: Path, create: Callable[..., None] = create_tables):
        self.database, self._create = database, create
        self._queue: queue.SimpleQueue[Work | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()
        self.flush()

    def put(self, work: Work) -> None:
        """Queues work on the database; a `StorageError` if earlier work could not be written."""
        self._raise_if_failed()
        self._queue.put(work)

    def flush(self) -> None:
        """Waits until everything queued so far is on disk; after a `StorageError`, nothing more is written."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.2):
            if not self._thread.is_alive():
                break
        self._raise_if_failed()

    def close(self) -> None:
        """Writes what is still queued and ends the thread; the journal is then one file, without write-ahead log."""
        self._queue.put(None)
        self._thread.join(timeout=30)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if isinstance(self._error, ConfigError):
            raise self._error
        if self._error is not None:
            with storage_boundary(self.database):
                raise self._error

    def _write(self) -> None:
        """Runs in the writer thread: everything that is queued goes into one transaction."""
        waiting: list[threading.Event] = []
        try:
            with open(self.database, "ab", opener=open_private):  # the files beside it get its mode
                pass
            db = sqlite3.connect(self.database, isolation_level=None)
            db.execute("PRAGMA synchronous = FULL")
            try:
                self._create(db, self.database)
                db.execute("PRAGMA journal_mode = WAL")  # not before: a journal of another format stays unchanged
                while self._write_group(db, waiting):
                    pass
                with contextlib.suppress(
                    sqlite3.OperationalError
                ):  # another process is reading: the log stays beside it
                    db.execute("PRAGMA journal_mode = DELETE")
            finally:
                db.close()
        except BaseException as error:  # noqa: BLE001  raised again in the owner's next call
            self._error = error
            if isinstance(error, DATABASE_ERRORS) and is_damage(error):
                note_damage(self.database.parent)
        finally:
            for event in waiting:
                event.set()

    def _write_group(self, db: sqlite3.Connection, waiting: list[threading.Event]) -> bool:
        """Commits one group; returns False once the owner has closed the journal."""
        entry = self._queue.get()
        if entry is None:
            return False
        db.execute("BEGIN IMMEDIATE")
        deadline, is_open, count = time.monotonic() + GROUP_COMMIT_S, True, 0
        while True:
            if entry is None:
                is_open = False
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
        return is_open

    def _next(self, count: int, deadline: float) -> Any:
        """Returns the group's next entry; `queue.Empty` if the group is full or its time is over."""
        if count >= GROUP_COMMIT_MAX:
            raise queue.Empty
        return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))


def note_damage(folder: Path) -> None:
    """Makes the next resume of a run check every row of its journal."""
    with contextlib.suppress(OSError):
        (folder / DAMAGE_MARK).touch(PRIVATE_FILE)
