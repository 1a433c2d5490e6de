"""The journal of a run, and the owner of its folder: SQLite is the record, files beside it are exports.

Episodes are committed in groups (at most 50 ms late), stages and jobs at once; every commit is a FULL one. A caller
never waits for the disk, except in `flush` and in what says so.

    jobs       intent -> pending -> running -> completed | failed | canceled     (JOB_TRANSITIONS)
    snapshots  where a run can go on: an epoch whose job is done, with the checkpoint that holds its weights
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import filelock
import zstandard

from reinforge.crash import crash_point
from reinforge.errors import BackendError, ConfigError, StorageError, boundary
from reinforge.files import replace_file, sweep, to_json
from reinforge.runs.episode_json import episode_json
from reinforge.runs.journal_writer import JournalWriter
from reinforge.types.episode import EpisodeRecord
from reinforge.types.job import JOB_TRANSITIONS, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum

INTENT = "intent"
"""Status of a job that is about to be submitted and has no name at its backend yet."""

LOCK, OWNER = ".lock", ".owner.json"
OWNER_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A point from which a run can go on.

    Attributes:
        epoch: The last epoch whose job is done; -1: before the first.
        version: Version of the weights that job made; None: the backend serves no policy.
        checkpoint: Folder of these weights, relative to the run folder; None: the backend keeps them to itself.
        state: What trainer and counters held.
    """

    epoch: int
    version: int | None
    checkpoint: str | None
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as the journal knows it: `ref` is None while it is an intent, `status` until it was heard of."""

    job_key: str
    epoch: int
    ref: TrainingJobRef | None
    status: TrainingJobStatus | None


class RunStore:
    """The journal of one run, and the owner of its folder.

    Args:
        folder: The run folder; must not exist yet.

    Raises:
        ConfigError: The folder exists.
        StorageError: The folder cannot be made, or another process owns it.
    """

    def __init__(self, folder: Path):
        if folder.exists():
            raise ConfigError(
                f"run folder {folder} exists already; give another --run_name, or remove that folder to start again"
            )
        fix = "name another place with -o finetuning.output_dir FOLDER"
        with boundary(StorageError, f"making the run folder {folder} ({fix})"):
            (folder / "episodes").mkdir(parents=True)
            (folder / "checkpoints").mkdir()
        self._own(folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Returns the journal of a run that was begun before, by a process that is gone.

        Raises:
            ConfigError: It is no run folder, or one of another version.
            StorageError: Another process owns it, or it cannot be read.
        """
        if not (folder / "run.sqlite").is_file():
            raise ConfigError(f"{folder} is no run folder: it has no run.sqlite")
        made = cls.__new__(cls)
        made._own(folder)
        return made

    def _own(self, folder: Path) -> None:
        self.folder = folder
        self._lock = filelock.FileLock(folder / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise StorageError(f"the run folder {folder} is in use by {owner_of(folder)}") from None
        except OSError as cause:
            raise StorageError(f"locking {folder}: {cause}") from cause
        try:
            replace_file(folder / OWNER, to_json({"pid": os.getpid(), "host": socket.gethostname()}))
            for part in ("checkpoints", "episodes"):
                (folder / part).mkdir(exist_ok=True)
            for each in (folder, folder / "checkpoints", folder / "episodes"):
                sweep(each)
            self._writer = JournalWriter(self.database)
        except BaseException:
            self._lock.release()
            raise

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.folder / "run.sqlite"

    def episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too."""
        key = record.key
        crash_point("rollout.before_journal")
        self._writer.put(
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
        crash_point("rollout.after_journal")

    def stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        """Records that a stage of an epoch has ended, and waits until that is on disk."""
        row = (epoch, stage, time.time(), to_json(data))
        self._writer.put(lambda db: db.execute("INSERT INTO stages (epoch, stage, at_s, data) VALUES (?,?,?,?)", row))
        self.flush()

    def intend_job(self, job_key: str, epoch: int, run_id: str) -> None:
        """Records that a job is about to be submitted, and waits until that is on disk."""
        row = (job_key, epoch, run_id, INTENT, time.time())
        query = "INSERT OR IGNORE INTO jobs (job_key, epoch, run_id, status, at_s) VALUES (?,?,?,?,?)"
        self._writer.put(lambda db: db.execute(query, row))
        self.flush()

    def job_submitted(self, job_key: str, ref: TrainingJobRef) -> None:
        """Records the name that the backend gave a job, and waits until that is on disk."""
        row = (ref.backend, TrainingStatusEnum.PENDING.value, time.time(), ref.model_dump_json(), job_key, INTENT)
        query = "UPDATE jobs SET backend=?, status=?, at_s=?, ref=? WHERE job_key=? AND status=?"
        self._writer.put(lambda db: db.execute(query, row))
        self.flush()

    def job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None:
        """Records where a job stands, and waits until that is on disk.

        Raises:
            BackendError: A job that has ended cannot go to another status.
        """
        known = self.known_job(job_key)
        before = known.status.status if known and known.status else TrainingStatusEnum.PENDING
        if status.status is not before and status.status not in JOB_TRANSITIONS[before]:
            raise BackendError(f"the job {job_key} cannot go from {before} to {status.status}")
        epoch = known.epoch if known else int((ref.metadata or {}).get("epoch") or 0)
        row = (job_key, epoch, ref.run_id, ref.backend, status.status.value, time.time(), ref.model_dump_json())
        data = to_json(status.model_dump(mode="json"))
        self._writer.put(lambda db: db.execute("INSERT OR REPLACE INTO jobs VALUES (?,?,?,?,?,?,?,?)", (*row, data)))
        self.flush()

    def known_job(self, job_key: str) -> JobRow | None:
        """Returns a job as it stands on disk."""
        found = self.rows("SELECT job_key, epoch, ref, data FROM jobs WHERE job_key = ?", (job_key,))
        return _job_row(*found[0]) if found else None

    def jobs(self) -> list[JobRow]:
        """Returns every job, in the order of their epochs."""
        return [_job_row(*row) for row in self.rows("SELECT job_key, epoch, ref, data FROM jobs ORDER BY epoch")]

    def policy_version(self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None) -> None:
        """Records a version of the weights."""
        row = (version, fingerprint, num_updates, checkpoint, time.time())
        self._writer.put(lambda db: db.execute("INSERT OR REPLACE INTO policy_versions VALUES (?,?,?,?,?)", row))

    def set_run(self, **values: Any) -> None:
        """Records facts about the whole run, such as its status."""
        rows = [(key, to_json(value)) for key, value in values.items()]
        self._writer.put(lambda db: db.executemany("INSERT OR REPLACE INTO run VALUES (?,?)", rows))

    def drop_checkpoint(self, checkpoint: str) -> None:
        """Records that a checkpoint is not kept any more."""
        query = "UPDATE policy_versions SET checkpoint = NULL WHERE checkpoint = ?"
        self._writer.put(lambda db: db.execute(query, (checkpoint,)))

    def drop_checkpoints_but(self, kept: Sequence[str]) -> None:
        """Records that no other checkpoints than these are kept."""
        marks = ",".join("?" * len(kept))
        query = f"UPDATE policy_versions SET checkpoint = NULL WHERE checkpoint NOT IN ({marks})"
        self._writer.put(lambda db: db.execute(query, tuple(kept)))

    def metrics(self, epoch: int, row: dict[str, Any]) -> None:
        """Records the metrics of an epoch."""
        values = (epoch, to_json(row))
        self._writer.put(lambda db: db.execute("INSERT OR REPLACE INTO metrics VALUES (?,?)", values))

    def metric_rows(self, before: int) -> list[dict[str, Any]]:
        """Returns the metrics of the epochs before one."""
        query = "SELECT data FROM metrics WHERE epoch < ? ORDER BY epoch"
        return [json.loads(data) for (data,) in self.rows(query, (before,))]

    def validation_rows(self) -> list[dict[str, Any]]:
        """Returns every validation, the baseline first."""
        return [json.loads(data) for (data,) in self.rows("SELECT data FROM validations ORDER BY epoch")]

    def version_rows(self) -> list[dict[str, Any]]:
        """Returns the versions of the weights, as the summary holds them."""
        names = ("version", "fingerprint", "num_updates")
        rows = self.rows(f"SELECT {', '.join(names)} FROM policy_versions ORDER BY version")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def facts(self) -> dict[str, Any]:
        """Returns what `set_run` recorded."""
        return read_facts(self.folder)

    def validation(self, epoch: int, row: dict[str, Any]) -> None:
        """Records a validation."""
        values = (epoch, to_json(row))
        self._writer.put(lambda db: db.execute("INSERT OR REPLACE INTO validations VALUES (?,?)", values))

    def snapshot(self, snapshot: Snapshot) -> None:
        """Records, in one transaction, where the run can go on from now on, and waits until that is on disk."""
        row = (snapshot.epoch, snapshot.version, snapshot.checkpoint, time.time(), to_json(snapshot.state))
        self._writer.put(lambda db: db.execute("INSERT OR REPLACE INTO snapshots VALUES (?,?,?,?,?)", row))
        self.flush()

    def snapshots(self) -> list[Snapshot]:
        """Returns every snapshot, the newest first."""
        rows = self.rows("SELECT epoch, version, checkpoint, data FROM snapshots ORDER BY epoch DESC")
        return [Snapshot(epoch, version, checkpoint, json.loads(data)) for epoch, version, checkpoint, data in rows]

    def go_back_to(self, epoch: int, *, forget_jobs: bool, forget_episodes: bool = False) -> None:
        """Forgets what came after an epoch's job, except episodes, which are used again, and the log of stages.

        Args:
            epoch: The run goes on after the job of this epoch.
            forget_jobs: True where the weights come from a checkpoint, so that later jobs did not happen.
            forget_episodes: True where later episodes were run under another configuration.
        """

        def forget(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM snapshots WHERE epoch > ?", (epoch,))
            db.execute("DELETE FROM metrics WHERE epoch >= ?", (epoch,))
            db.execute("DELETE FROM validations WHERE epoch >= ?", (epoch,))
            if forget_jobs:
                db.execute("DELETE FROM jobs WHERE epoch > ?", (epoch,))
            if forget_episodes:
                later = "epoch > ? OR (epoch = ? AND phase != 'collect') OR phase LIKE 'confirm%'"
                db.execute(f"DELETE FROM episodes WHERE {later}", (epoch, epoch))

        self._writer.put(forget)
        self.flush()

    def forget_versions(self, first: int) -> None:
        """Forgets the versions of the weights from `first` on, which will be made again."""
        self._writer.put(lambda db: db.execute("DELETE FROM policy_versions WHERE version >= ?", (first,)))

    def begin_session(self) -> None:
        """Records that a process works on the run."""
        row = (time.time(), os.getpid(), socket.gethostname())
        self._writer.put(lambda db: db.execute("INSERT INTO sessions (started_s, pid, host) VALUES (?,?,?)", row))

    def session_resumed(self, after: int) -> None:
        """Records the epoch that this process goes on after."""
        query = "UPDATE sessions SET resumed_after = ? WHERE id = (SELECT max(id) FROM sessions)"
        self._writer.put(lambda db: db.execute(query, (after,)))

    def end_session(self, how: str) -> None:
        """Records how the work of this process ended."""
        query = "UPDATE sessions SET ended_s = ?, ended = ? WHERE id = (SELECT max(id) FROM sessions)"
        self._writer.put(lambda db: db.execute(query, (time.time(), how)))

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk.

        Raises:
            StorageError: The journal could not be written; nothing after the failure is recorded.
        """
        self._writer.flush()

    def recorded_episodes(self, phase: str, epoch: int) -> dict[str, str]:
        """Returns the episodes of a phase of an epoch that are on disk: key -> JSON."""
        return dict(self.rows("SELECT key, data FROM episodes WHERE phase = ? AND epoch = ?", (phase, epoch)))

    def export_epoch(self, epoch: int) -> Path | None:
        """Writes the epoch's collected episodes as compressed JSONL; returns the file, or None if there are none."""
        self.flush()
        target = self.folder / "episodes" / f"epoch-{epoch:04d}.jsonl.zst"
        rows = self.rows("SELECT data FROM episodes WHERE phase = 'collect' AND epoch = ? ORDER BY key", (epoch,))
        if not rows:
            return None
        text = "".join(f"{row[0]}\n" for row in rows)
        crash_point("export.mid")
        replace_file(target, zstandard.ZstdCompressor(level=3).compress(text.encode()))
        return target

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Returns rows of the record as it stands on disk."""
        return read_rows(self.folder, query, parameters)

    def close(self) -> None:
        """Writes what is left and gives the folder back."""
        try:
            self._writer.close()
        finally:
            with contextlib.suppress(OSError):
                (self.folder / OWNER).unlink()
            self._lock.release()


def owner_of(folder: Path) -> str:
    """Returns who owns a locked run folder, for a message; waits a moment for one who has only just taken it."""
    deadline = time.monotonic() + OWNER_WAIT_S
    while time.monotonic() < deadline:
        try:
            owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
            if owner["host"] != socket.gethostname() or _is_alive(owner["pid"]):
                return f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            pass
        time.sleep(0.01)
    return "another process"


def _is_alive(pid: int) -> bool:
    """False if there is no such process; the name of an owner that died is still in the folder."""
    if os.name == "nt":  # where signal 0 is not a question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _job_row(job_key: str, epoch: int, ref: str | None, data: str | None) -> JobRow:
    return JobRow(
        job_key,
        epoch,
        TrainingJobRef.model_validate_json(ref) if ref else None,
        TrainingJobStatus.model_validate_json(data) if data else None,
    )


def read_rows(folder: Path, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns rows of a run's record; nothing is locked or changed, but that a dead writer's half is taken back.

    Raises:
        sqlite3.Error: It cannot be read.
    """
    database = folder / "run.sqlite"
    # a folder that may not be written, such as an archive: without a journal beside it, the file is all there is
    is_archive = not os.access(folder, os.W_OK) and not database.with_name("run.sqlite-wal").exists()
    uri = database.absolute().as_uri()
    try:
        return _fetched(f"{uri}?{'immutable=1' if is_archive else 'mode=ro'}", query, parameters)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # its process was killed while it made the file, before the write-ahead log: only a writer takes that back
        return _fetched(f"{uri}?mode=rw", query, parameters)


def _fetched(uri: str, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        return connection.execute(query, parameters).fetchall()


def read_facts(folder: Path) -> dict[str, Any]:
    """Returns what `set_run` recorded; nothing of a run whose process died before its journal had tables."""
    if not read_rows(folder, "SELECT 1 FROM sqlite_master WHERE name = 'run'"):
        return {}
    return {key: json.loads(value) for key, value in read_rows(folder, "SELECT key, value FROM run")}


def read_outputs(folder: Path, phase: str) -> dict[str, Any]:
    """Returns what the agent returned on each example of a phase, from the record of a finished run.

    Args:
        folder: The run folder.
        phase: For example `confirm_base`.
    """
    query = "SELECT example_id, data FROM episodes WHERE phase = ? AND generation = 0 ORDER BY example_id"
    outputs = {example: json.loads(data)["output"] for example, data in read_rows(folder, query, (phase,))}
    return {example: output for example, output in outputs.items() if output is not None}
