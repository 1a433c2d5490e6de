"""The run folder and its journal: one process owns it, SQLite is the record, files beside it are exports.

Episodes are committed in groups (at most 50 ms late), stages and jobs at once; every commit is a FULL one. A caller
never waits for the disk, except in `flush`.
"""

from __future__ import annotations

import json
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import zstandard

from reinforge.errors import ConfigError, StorageError, boundary
from reinforge.types.episode import EpisodeRecord
from reinforge.types.job import TrainingJobRef, TrainingJobStatus

SCHEMA_VERSION = 1
GROUP_COMMIT_S = 0.05
GROUP_COMMIT_MAX = 1000

_SCHEMA = """
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE stages (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, stage TEXT NOT NULL, at_s REAL NOT NULL, data TEXT NOT NULL);
CREATE TABLE jobs (
    job_key TEXT PRIMARY KEY, run_id TEXT NOT NULL, backend TEXT NOT NULL, status TEXT NOT NULL, at_s REAL NOT NULL,
    data TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE episodes (
    key TEXT PRIMARY KEY, phase TEXT NOT NULL, epoch INTEGER NOT NULL, round INTEGER NOT NULL,
    example_id TEXT NOT NULL, generation INTEGER NOT NULL, attempt INTEGER NOT NULL, outcome TEXT NOT NULL,
    reward REAL, data TEXT NOT NULL);
CREATE INDEX episodes_by_epoch ON episodes (phase, epoch);
CREATE TABLE policy_versions (
    version INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL, num_updates INTEGER, checkpoint TEXT,
    at_s REAL NOT NULL);
"""


def to_json(value: Any) -> str:
    """Returns compact JSON; what JSON does not know becomes text, and a float that is no number becomes null."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def episode_json(record: EpisodeRecord) -> dict[str, Any]:
    """Returns one episode as the journal and its export hold it: messages, token ids, log-probs, outcome, reward."""
    return {
        "example_id": record.key.example_id,
        "generation": record.key.generation,
        "phase": record.key.phase,
        "epoch": record.key.epoch,
        "round": record.key.round,
        "attempt": record.attempt,
        "seed": record.seed,
        "outcome": record.outcome.value,
        "reason": record.reason,
        "reward": record.reward,
        "scores": {
            name: {"score": item.score, "reasoning": item.reasoning, "error": item.error}
            for name, item in record.scores.items()
        },
        "output": record.item.output_obj,
        "wall_s": round(record.wall_s, 6),
        "calls": [_call_json(call) for call in record.calls],
        "marks": [
            {**asdict(mark), "data": _plain(mark.data) if mark.data is not None else None} for mark in record.marks
        ],
    }


def _call_json(call: Any) -> dict[str, Any]:
    tokens, request = call.reply.tokens, call.request
    return {
        "call_id": call.call_id,
        "llm": call.llm,
        "functions": call.functions,
        "messages": request.messages,
        "tools": request.tools,
        "reply": call.reply.message,
        "finish_reason": call.reply.finish_reason,
        "temperature": request.sampling.temperature,
        "prompt_token_ids": tokens.prompt_token_ids if tokens else None,
        "token_ids": tokens.token_ids if tokens else None,
        "logprobs": tokens.logprobs if tokens else None,
        "policy_version": tokens.policy_version if tokens else None,
    }


class RunStore:
    """The journal of one run, and the owner of its folder.

    Args:
        folder: The run folder; must not exist yet.

    Raises:
        ConfigError: The folder exists.
        StorageError: The folder cannot be made, or another process owns it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if folder.exists():
            raise ConfigError(
                f"run folder {folder} exists already; give another --run_name, or remove that folder to start again"
            )
        with boundary(StorageError, f"making the run folder {folder}"):
            (folder / "episodes").mkdir(parents=True)
            (folder / "checkpoints").mkdir()
        self._lock = filelock.FileLock(folder / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise StorageError(f"another process owns the run folder {folder}") from None
        self._queue: queue.SimpleQueue[Callable[[sqlite3.Connection], None] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._error: BaseException | None = None
        self._writer = threading.Thread(target=self._write, name="journal", daemon=True)
        self._writer.start()
        self.flush()

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.folder / "run.sqlite"

    def episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too."""
        key = record.key
        self._put(
            lambda db: db.execute(
                "INSERT OR REPLACE INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?)",
                (
                    str(key),
                    key.phase,
                    key.epoch,
                    key.round,
                    key.example_id,
                    key.generation,
                    record.attempt,
                    record.outcome.value,
                    record.reward,
                    to_json(episode_json(record)),
                ),
            )
        )

    def stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        """Records that a stage of an epoch has ended, and waits until that is on disk."""
        row = (epoch, stage, time.time(), to_json(data))
        self._put(lambda db: db.execute("INSERT INTO stages (epoch, stage, at_s, data) VALUES (?,?,?,?)", row))
        self.flush()

    def job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None:
        """Records where a job stands, and waits until that is on disk."""
        row = (
            job_key,
            ref.run_id,
            ref.backend,
            status.status.value,
            time.time(),
            to_json(status.model_dump(mode="json")),
        )
        self._put(lambda db: db.execute("INSERT OR REPLACE INTO jobs VALUES (?,?,?,?,?,?)", row))
        self.flush()

    def policy_version(self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None) -> None:
        """Records a version of the weights."""
        row = (version, fingerprint, num_updates, checkpoint, time.time())
        self._put(lambda db: db.execute("INSERT OR REPLACE INTO policy_versions VALUES (?,?,?,?,?)", row))

    def set_run(self, **values: Any) -> None:
        """Records facts about the whole run, such as its status."""
        rows = [(key, to_json(value)) for key, value in values.items()]
        self._put(lambda db: db.executemany("INSERT OR REPLACE INTO run VALUES (?,?)", rows))

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk.

        Raises:
            StorageError: The journal could not be written; nothing after the failure is recorded.
        """
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.2):
            if not self._writer.is_alive():
                break
        self._raise_if_failed()

    def export_epoch(self, epoch: int) -> Path | None:
        """Writes the epoch's collected episodes as compressed JSONL; returns the file, or None if there are none."""
        self.flush()
        target = self.folder / "episodes" / f"epoch-{epoch:04d}.jsonl.zst"
        rows = self.rows("SELECT data FROM episodes WHERE phase = 'collect' AND epoch = ? ORDER BY key", (epoch,))
        if not rows:
            return None
        text = "".join(f"{row[0]}\n" for row in rows)
        replace_file(target, zstandard.ZstdCompressor(level=3).compress(text.encode()))
        return target

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Returns rows of the record as it stands on disk."""
        return read_rows(self.folder, query, parameters)

    def close(self) -> None:
        """Writes what is left and gives the folder back."""
        self._queue.put(None)
        self._writer.join(timeout=30)
        self._lock.release()
        self._raise_if_failed()

    def _put(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        self._raise_if_failed()
        self._queue.put(work)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise StorageError(f"cannot write {self.database}: {self._error}") from self._error

    def _write(self) -> None:
        """The writer thread: everything that is waiting goes into one transaction."""
        waiting: list[threading.Event] = []
        try:
            db = sqlite3.connect(self.database, isolation_level=None)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
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
        db.execute("COMMIT")
        while waiting:
            waiting.pop().set()
        return goes_on

    def _next(self, count: int, deadline: float) -> Any:
        """Returns the group's next entry; `queue.Empty` once the group is full or its time is over."""
        if count >= GROUP_COMMIT_MAX:
            raise queue.Empty
        return self._queue.get(timeout=max(0.0, deadline - time.monotonic()))


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part.

    Raises:
        StorageError: It cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with boundary(StorageError, f"writing {path} ({len(data)} bytes)"):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON, whole."""
    replace_file(path, json.dumps(json.loads(to_json(value)), indent=1) + "\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON line.

    Raises:
        StorageError: It cannot be written.
    """
    with boundary(StorageError, f"appending to {path}"), open(path, "a", encoding="utf-8") as file:
        file.write(to_json(value) + "\n")


def read_rows(folder: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns rows of a run's record; nothing is locked or changed."""
    connection = sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(query, parameters).fetchall()
    finally:
        connection.close()


def read_outputs(folder: Path, phase: str) -> dict[str, Any]:
    """Returns what the agent returned on each example of a phase, from the record of a finished run.

    Args:
        folder: The run folder.
        phase: For example `confirm_base`.
    """
    query = "SELECT example_id, data FROM episodes WHERE phase = ? AND generation = 0 ORDER BY example_id"
    outputs = {example: json.loads(data)["output"] for example, data in read_rows(folder, query, (phase,))}
    return {example: output for example, output in outputs.items() if output is not None}
