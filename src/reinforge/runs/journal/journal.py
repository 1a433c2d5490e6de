"""The journal of a run, written by the one process that owns the run folder.

SQLite (`run.sqlite`) is the record; the files beside it are exports. Episodes are committed in groups, at most 50 ms
late; stages, jobs and snapshots at once, and their calls wait until they are on disk, as `flush` does. Every commit is
synced to disk (`synchronous = FULL`).

    jobs       intent -> pending -> running -> completed | failed | canceled     (JOB_TRANSITIONS)
    snapshots  where a run can resume: an epoch whose job is done, and the checkpoint with its weights
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import filelock
import zstandard
from pydantic import BaseModel

from reinforge.crash import crash_point
from reinforge.errors import BackendError, ConfigError, StorageError, boundary
from reinforge.files import (
    PRIVATE_FILE,
    make_private_folder,
    read_json_file,
    refuse_unwritable,
    remove_leftovers,
    replace_file,
    to_json,
)
from reinforge.runs.journal.episode_json import dump_episode
from reinforge.runs.journal.packing import EpisodePacker, build_episode_row, write_line
from reinforge.runs.journal.reader import JOURNAL, JournalReader
from reinforge.runs.journal.schema import insert_row, update_rows
from reinforge.runs.journal.writer import JournalWriter, note_damage
from reinforge.runs.manifest import CHANGING, GROWING, list_files, unlist, write_listed
from reinforge.runs.rows import EpochMetrics, EpochSnapshot, ValidationRow
from reinforge.types.episode import EpisodeRecord
from reinforge.types.job import JOB_TRANSITIONS, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum

INTENT = "intent"  # state of a job that is about to be submitted and has no name at its backend yet

LOCK, OWNER = ".lock", ".owner.json"

OWNER_WAIT_S = 1.0  # how long an error message waits for the name of a process that has only just locked the folder


class RunJournal(JournalReader):
    """The journal of a run that this process owns, for a new run folder: a reader that also records."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        if folder.exists():
            raise ConfigError(
                f"the run folder {folder} already exists; choose another --run_name, or remove the folder to start over"
            )
        fix = "to use another place, set -o finetuning.output_dir FOLDER"
        with boundary(StorageError, f"cannot create the run folder {folder} ({fix})"):
            make_private_folder(folder, exist_ok=False)  # another process may have just made it
            for part in ("episodes", "checkpoints"):
                make_private_folder(folder / part)
        self._take_ownership()

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Returns the journal of an existing run whose process has exited; a `ConfigError` if it has another format."""
        if not (folder / JOURNAL).is_file():
            raise ConfigError(f"{folder} is not a run folder: it has no {JOURNAL}")
        journal = cls.__new__(cls)
        JournalReader.__init__(journal, folder)
        journal._take_ownership()
        return journal

    def _take_ownership(self) -> None:
        folder = self.folder
        self._lock = lock_run(folder)
        try:
            replace_file(folder / OWNER, to_json({"pid": os.getpid(), "host": socket.gethostname()}))
            for part in ("checkpoints", "episodes"):
                make_private_folder(folder / part)
            for each in (folder, folder / "checkpoints", folder / "episodes"):
                remove_leftovers(each)
            unlist(folder, GROWING)
            self._writer = JournalWriter(self.database)
            self._has_tables = True
        except BaseException:
            self._lock.release()
            raise

    def record_episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too; after a `RecordError` nothing was recorded."""
        with refuse_unwritable():  # here, not in the writer, which an error would end
            data = dump_episode(record)
            packer, row = EpisodePacker(data), build_episode_row(data)
        crash_point("rollout.before_journal")
        self._writer.put(lambda db: insert_row(db, "episodes", **row, data=packer.compress()))
        crash_point("rollout.after_journal")

    def record_stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        self._insert("stages", epoch=epoch, stage=stage, at_s=time.time(), data=to_json(data))
        self.flush()

    def record_job_intent(self, job_key: str, epoch: int, run_id: str) -> None:
        row = {"job_key": job_key, "epoch": epoch, "run_id": run_id, "status": INTENT, "at_s": time.time()}
        self._writer.put(lambda db: insert_row(db, "jobs", keep_existing=True, **row))
        self.flush()

    def record_job_submission(self, job_key: str, ref: TrainingJobRef) -> None:
        pending, data = TrainingStatusEnum.PENDING.value, _dump_model(ref)
        changes = {"backend": ref.backend, "status": pending, "at_s": time.time(), "ref": data}
        condition = "job_key = :known AND status = :before"
        self._writer.put(lambda db: update_rows(db, "jobs", changes, condition, known=job_key, before=INTENT))
        self.flush()

    def record_job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None:
        """Records the status of a job; a `BackendError` if it had ended with another one before."""
        known = self.find_job(job_key)
        before = known.status.status if known and known.status else TrainingStatusEnum.PENDING
        if status.status is not before and status.status not in JOB_TRANSITIONS[before]:
            raise BackendError(f"the job {job_key} cannot change from {before} to {status.status}")
        epoch = known.epoch if known else int((ref.metadata or {}).get("epoch") or 0)
        self._insert(
            "jobs",
            job_key=job_key,
            epoch=epoch,
            run_id=ref.run_id,
            backend=ref.backend,
            status=status.status.value,
            at_s=time.time(),
            ref=_dump_model(ref),
            data=_dump_model(status),
        )
        self.flush()

    def record_policy_version(
        self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None
    ) -> None:
        row = {"version": version, "fingerprint": fingerprint, "num_updates": num_updates, "checkpoint": checkpoint}
        self._insert("policy_versions", **row, at_s=time.time())

    def set_facts(self, **facts: Any) -> None:
        for key, value in facts.items():
            self._insert("run", key=key, value=to_json(value))

    def forget_checkpoint(self, checkpoint: str) -> None:
        changes, condition = {"checkpoint": None}, "checkpoint = :removed"
        self._writer.put(lambda db: update_rows(db, "policy_versions", changes, condition, removed=checkpoint))

    def forget_checkpoints_except(self, kept: Sequence[str]) -> None:
        names = {f"kept_{number}": name for number, name in enumerate(kept)}
        condition = f"checkpoint NOT IN ({', '.join(f':{name}' for name in names)})"
        self._writer.put(lambda db: update_rows(db, "policy_versions", {"checkpoint": None}, condition, **names))

    def record_metrics(self, row: EpochMetrics) -> None:
        self._insert("metrics", epoch=row.epoch, data=to_json(row.as_dict()))

    def record_validation(self, row: ValidationRow) -> None:
        self._insert("validations", epoch=row.epoch, data=to_json(row.as_dict()))

    def record_snapshot(self, snapshot: EpochSnapshot) -> None:
        """Records where the run can resume from now on."""
        row = {"epoch": snapshot.epoch, "version": snapshot.version, "checkpoint": snapshot.checkpoint}
        self._insert("snapshots", **row, at_s=time.time(), data=to_json(snapshot.state))
        self.flush()

    def rewind(self, epoch: int, *, forget_jobs: bool, forget_episodes: bool = False) -> None:
        """Deletes what came after an epoch's job, except its episodes, which are used again, and the list of stages.

        Args:
            forget_jobs: True where the weights come from a checkpoint, so that later jobs count as not submitted;
                False: only those that ended without a model do.
            forget_episodes: True where later episodes ran under another configuration.
        """

        def forget(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM snapshots WHERE epoch > ?", (epoch,))
            db.execute("DELETE FROM metrics WHERE epoch >= ?", (epoch,))
            db.execute("DELETE FROM validations WHERE epoch >= ?", (epoch,))
            ended = "" if forget_jobs else " AND status IN ('failed', 'canceled')"
            db.execute(f"DELETE FROM jobs WHERE epoch > ?{ended}", (epoch,))
            if forget_episodes:
                later = "epoch > ? OR (epoch = ? AND phase != 'collect') OR phase LIKE 'confirm%'"
                found = f"SELECT rowid FROM episodes WHERE {later}"  # the index alone answers it
                db.execute(f"DELETE FROM episodes WHERE rowid IN ({found})", (epoch, epoch))

        self._writer.put(forget)
        self.flush()

    def forget_versions_from(self, first: int) -> None:
        self._writer.put(lambda db: db.execute("DELETE FROM policy_versions WHERE version >= ?", (first,)))

    def start_session(self) -> None:
        unlist(self.folder, CHANGING)
        self._insert("sessions", started_s=time.time(), pid=os.getpid(), host=socket.gethostname())

    def record_resume(self, after: int) -> None:
        self._update_session(resumed_after=after)

    def end_session(self, how: str) -> None:
        self._update_session(ended_s=time.time(), ended=how)

    def _update_session(self, **changes: Any) -> None:
        newest = "id = (SELECT max(id) FROM sessions)"
        self._writer.put(lambda db: update_rows(db, "sessions", changes, newest))

    def _note_damage(self) -> None:
        note_damage(self.folder)

    def _insert(self, table: str, **values: Any) -> None:
        self._writer.put(lambda db: insert_row(db, table, **values))

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk; after a `StorageError`, nothing more is recorded."""
        self._writer.flush()

    def export_epoch(self, epoch: int) -> Path | None:
        """Writes the epoch's collected episodes as compressed JSONL; returns the file, or None if there are none."""
        self.flush()
        target = self.folder / "episodes" / f"epoch-{epoch:04d}.jsonl.zst"
        found = self.packed_episodes("collect", epoch)
        if not found:
            return None
        text = b"".join(write_line(data) for _, data in sorted(found.items()))
        crash_point("export.mid")
        packed = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(text)
        write_listed(self.folder, f"episodes/{target.name}", packed)
        return target

    def close(self) -> None:
        """Writes what is still queued, lists every file in the manifest and releases the folder."""
        try:
            self._writer.close()
            list_files(self.folder)
        finally:
            with contextlib.suppress(OSError):
                (self.folder / OWNER).unlink()
            self._lock.release()


def _dump_model(value: BaseModel) -> str:
    return to_json(value.model_dump(mode="json"))


def lock_run(folder: Path) -> filelock.BaseFileLock:
    """Returns the lock of a run folder, taken; a `StorageError` names the process that has it."""
    lock = filelock.FileLock(folder / LOCK, mode=PRIVATE_FILE)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StorageError(f"the run folder {folder} is in use by {describe_owner(folder)}") from None
    except OSError as cause:
        raise StorageError(f"cannot lock {folder}: {cause}") from cause
    return lock


def describe_owner(folder: Path) -> str:
    """Returns which process owns a locked run folder, as `process 4711 on host`; `another process` if unknown."""
    deadline = time.monotonic() + OWNER_WAIT_S
    while time.monotonic() < deadline:
        try:
            owner = read_json_file(folder / OWNER)
            if owner["host"] != socket.gethostname() or is_alive(owner["pid"]):  # a killed owner leaves its name
                return f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            pass
        time.sleep(0.01)
    return "another process"


def is_alive(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
