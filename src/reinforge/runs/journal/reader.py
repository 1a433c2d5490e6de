"""Reads the journal of a run, whose process may be working, stopped or dead, without locking or changing it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError, boundary
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.packing import unpack_episode
from reinforge.runs.journal.schema import JSON_COLUMNS, SCHEMA_VERSION, describe_format, find_problem, read_columns
from reinforge.runs.rows import (
    BASELINE,
    EpisodeExtent,
    EpisodeHead,
    EpisodeRow,
    EpochMetrics,
    EpochSnapshot,
    JobRow,
    ListedEpisode,
    PolicyVersion,
    Session,
    SnapshotRow,
    StageRow,
    ValidationRow,
)
from reinforge.types.job import TrainingJobRef, TrainingJobStatus

JOURNAL = "run.sqlite"
REPAIR_NOTES = "repair_notes"  # the fact that holds what a rebuilt journal has lost, for the run that resumes
DAMAGE_MARK = ".damaged"  # file beside the journal of a run that has met damage in it: the next resume checks every row


class JournalReader:
    """The journal of a run as it stands on disk, as typed rows. An empty journal has no rows.

    Every method raises `StorageError` where the journal cannot be read, or has another format.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._has_tables = False

    @property
    def database(self) -> Path:
        return self.folder / JOURNAL

    def is_empty(self) -> bool:
        """True if the journal has no tables: its process died before it had created them."""
        if self._has_tables:
            return False
        [[found]] = self._fetch("PRAGMA user_version")
        if found not in (0, SCHEMA_VERSION):
            raise StorageError(describe_format(self.database, found))
        self._has_tables = found != 0
        return not self._has_tables

    def facts(self) -> dict[str, Any]:
        """Returns the facts about the whole run, such as its status; empty: the run has not started."""
        return {row["key"]: row["value"] for row in self._read("run")}

    def find_lost_log(self) -> list[str]:
        """Finds that the journal ends before what the run folder shows: its write-ahead log is not there."""
        checkpoints = Checkpoints(self.folder)
        known = {name: (checkpoints.read_state(name) or {}).get("epoch") for name in checkpoints.names()}
        found = self._rows("SELECT (SELECT count(*) FROM run), (SELECT max(epoch) FROM snapshots)")
        num_facts, newest = found[0] if found else (0, None)
        later = [name for name, epoch in known.items() if isinstance(epoch, int) and (newest is None or epoch > newest)]
        if (later and not num_facts) or len(later) > 1:  # a crash leaves at most one that is not recorded yet
            return [f"it ends before {later[-1]}: its write-ahead log ({JOURNAL}-wal) is gone"]
        return []

    def sessions(self) -> list[Session]:
        return [Session(**row) for row in self._read("sessions", "ORDER BY id")]

    def stages(self) -> list[StageRow]:
        rows = self._read("stages", "ORDER BY id")
        return [StageRow(row["epoch"], row["stage"], row["at_s"], row["data"]) for row in rows]

    def jobs(self) -> list[JobRow]:
        return [_parse_job(row) for row in self._read("jobs", "ORDER BY epoch")]

    def find_job(self, job_key: str) -> JobRow | None:
        found = self._read("jobs", "WHERE job_key = ?", (job_key,))
        return _parse_job(found[0]) if found else None

    def metrics(self, before: int) -> list[EpochMetrics]:
        rows = self._read("metrics", "WHERE epoch < ? ORDER BY epoch", (before,))
        return [EpochMetrics.from_dict(row["data"]) for row in rows]

    def validations(self) -> list[ValidationRow]:
        return [ValidationRow.from_dict(row["data"]) for row in self._read("validations", "ORDER BY epoch")]

    def policy_versions(self) -> list[PolicyVersion]:
        rows = self._read("policy_versions", "ORDER BY version")
        return [
            PolicyVersion(row["version"], row["fingerprint"], row["num_updates"], row["checkpoint"]) for row in rows
        ]

    def snapshots(self) -> list[EpochSnapshot]:
        rows = self._read("snapshots", "ORDER BY epoch DESC")
        return [EpochSnapshot(row["epoch"], row["version"], row["checkpoint"], row["data"]) for row in rows]

    def snapshot_rows(self) -> list[SnapshotRow]:
        """Returns every snapshot without its state, which is not read, the newest first."""
        rows = self._rows("SELECT epoch, version, checkpoint FROM snapshots ORDER BY epoch DESC")
        return [SnapshotRow(*row) for row in rows]

    def find_snapshot(self, epoch: int) -> EpochSnapshot | None:
        """Returns the snapshot of an epoch with its state; None: there is none."""
        found = self._read("snapshots", "WHERE epoch = ?", (epoch,))
        return EpochSnapshot(epoch, found[0]["version"], found[0]["checkpoint"], found[0]["data"]) if found else None

    def count_episodes(self, phase: str | None = None, epoch: int | None = None) -> int:
        where, values = _build_filter(phase, epoch)
        rows = self._rows(f"SELECT count(*) FROM episodes{where}", values)
        return int(rows[0][0]) if rows else 0

    def count_examples(self, phase: str) -> int:
        rows = self._rows("SELECT count(DISTINCT example_id) FROM episodes WHERE phase = ?", (phase,))
        return int(rows[0][0]) if rows else 0

    def count_collected(self) -> dict[int, int]:
        return dict(self._rows("SELECT epoch, count(*) FROM episodes WHERE phase = 'collect' GROUP BY epoch"))

    def packed_episodes(self, phase: str, epoch: int) -> dict[str, bytes]:
        """Returns the episodes of one epoch by their keys, for `unpack_episode`."""
        rows = self._read("episodes", "WHERE phase = ? AND epoch = ?", (phase, epoch), parse=False)
        return {row["key"]: row["data"] for row in rows}

    def episode_heads(self, phase: str, epoch: int | None = None) -> list[EpisodeHead]:
        """Returns the episodes of a phase without their messages, by example; of one epoch, if it is given."""
        where, values = _build_filter(phase, epoch)
        columns = "key, epoch, round, example_id, outcome, reason, scores, reward"
        rows = self._rows(
            f"SELECT {columns} FROM episodes{where} ORDER BY epoch, round, example_id, generation", values
        )
        heads = []
        for key, of_epoch, round_, example_id, outcome, reason, scores, reward in rows:
            try:
                numbers = dict(json.loads(scores))
            except (TypeError, ValueError) as error:
                self._note_damage()
                raise DamagedJournal(self.folder, f"episodes {key}: its scores are not JSON") from error
            heads.append(EpisodeHead(key, of_epoch, round_, example_id, outcome, reason or "", reward, numbers))
        return heads

    def last_heads(self, phase: str) -> list[EpisodeHead]:
        """Returns the episodes of a phase in its last epoch: a run that was extended may have several verdicts."""
        heads = self.episode_heads(phase)
        last = max((head.epoch for head in heads), default=BASELINE)
        return [head for head in heads if head.epoch == last]

    def find_extent(self) -> EpisodeExtent:
        last = "coalesce(max(started_s), 0.0) FROM sessions"
        parts = ("count(*) FROM episodes", "coalesce(max(rowid), 0) FROM episodes", last)
        rows = self._rows(f"SELECT {', '.join(f'(SELECT {part})' for part in parts)}")
        return EpisodeExtent(*rows[0]) if rows else EpisodeExtent(0, 0, 0.0)

    def list_episodes(self, after: int = 0) -> list[ListedEpisode]:
        """Returns every episode with a number above `after`, in that order; what they hold is not read."""
        columns = "rowid, key, phase, epoch, round, example_id, generation, outcome, reward"
        rows = self._rows(f"SELECT {columns} FROM episodes WHERE rowid > ? ORDER BY rowid", (after,))
        return list(map(ListedEpisode._make, rows))

    def read_data(self, numbers: Iterable[int]) -> dict[int, bytes]:
        """Returns packed episodes by their number; their checksums are not compared."""
        rows = "SELECT rowid, data FROM episodes WHERE rowid IN (SELECT value FROM json_each(?))"
        return dict(self._rows(rows, (json.dumps(list(numbers)),)))

    def count_outcomes(self) -> list[tuple[str, str, int]]:
        found = "outcome, coalesce(reason, ''), count(*)"
        return self._rows(f"SELECT {found} FROM episodes WHERE outcome != 'ok' GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2")

    def find_episode(self, key: str) -> EpisodeRow | None:
        found = self._read("episodes", "WHERE key = ?", (key,))
        return EpisodeRow(found[0]["key"], found[0]["data"]) if found else None

    def episode_at(self, number: int, phase: str | None = None, epoch: int | None = None) -> EpisodeRow | None:
        where, values = _build_filter(phase, epoch)
        found = self._read("episodes", f"{where} ORDER BY rowid LIMIT 1 OFFSET ?", (*values, number))
        return EpisodeRow(found[0]["key"], found[0]["data"]) if found else None

    def episode_keys(self, limit: int, phase: str | None = None, epoch: int | None = None) -> list[str]:
        where, values = _build_filter(phase, epoch)
        return [key for (key,) in self._rows(f"SELECT key FROM episodes{where} LIMIT ?", (*values, limit))]

    def dialogues(self, phase: str, epoch: int | None = None, limit: int | None = None) -> list[EpisodeRow]:
        """Returns the episodes of multi-agent protocols, in the order of their keys."""
        where, values = _build_filter(phase, epoch)
        tail = f"{where} AND protocol IS NOT NULL ORDER BY epoch, example_id, generation, round LIMIT ?"
        rows = self._read("episodes", tail, (*values, -1 if limit is None else limit))
        return [EpisodeRow(row["key"], row["data"]) for row in rows]

    def has_dialogues(self, phase: str, epoch: int | None, num_probed: int) -> bool:
        where, values = _build_filter(phase, epoch)
        first = f"SELECT protocol FROM episodes{where} LIMIT {int(num_probed)}"
        return bool(self._rows(f"SELECT 1 FROM ({first}) WHERE protocol IS NOT NULL LIMIT 1", values))

    def outputs(self, phase: str) -> dict[str, Any]:
        """Returns what the agent returned in a phase, by example id: the first generation, without missing ones."""
        rows = self._read("episodes", "WHERE phase = ? AND generation = 0 ORDER BY example_id", (phase,))
        outputs = {row["example_id"]: row["data"]["output"] for row in rows}
        return {example: output for example, output in outputs.items() if output is not None}

    def _read(
        self, table: str, tail: str = "", parameters: tuple[Any, ...] = (), *, parse: bool = True
    ) -> list[dict[str, Any]]:
        """Returns rows by column, each compared with its checksum; `parse` turns columns that hold JSON into values."""
        names = list(read_columns()[table])
        if self.is_empty():
            return []
        rows = []
        for *row, checksum in self._fetch(f"SELECT {', '.join(names)}, checksum FROM {table} {tail}", parameters):
            problem = find_problem(row, checksum)
            if problem is not None:
                self._note_damage()
                raise DamagedJournal(self.folder, f"{table} {row[0]}: {problem}")
            values = dict(zip(names, row, strict=True))
            if parse:
                values |= {name: _parse(values[name]) for name in JSON_COLUMNS & values.keys()}
            rows.append(values)
        return rows

    def _rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return [] if self.is_empty() else self._fetch(query, parameters)

    def _fetch(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with boundary(StorageError, f"cannot read {self.database}"):
            try:
                with open_for_reading(self.database) as connection:
                    return connection.execute(query, parameters).fetchall()
            except DATABASE_ERRORS as error:
                if is_damage(error):
                    self._note_damage()
                    raise DamagedJournal(self.folder, f"{type(error).__name__}: {error}") from error
                raise

    def _note_damage(self) -> None:
        """Does nothing: a reader changes nothing."""


class DamagedJournal(StorageError):
    """A journal holds something other than what was written to it."""

    def __init__(self, folder: Path, what: str):
        fix = f"`reinforge runs verify {folder}` shows what can be recovered"
        super().__init__(f"{folder / JOURNAL} is damaged: {what}\n    fix: {fix}")


DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading a journal may raise; the second where the name of a column is no longer text."""


def is_damage(error: Exception) -> bool:
    """True if one of `DATABASE_ERRORS` is about what stands in the file, not about reaching it."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # text that is not UTF-8 has no code
    return code & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)


def _parse(value: str | bytes | None) -> Any:
    if isinstance(value, bytes):
        return unpack_episode(value)
    return None if value is None else json.loads(value)


def _build_filter(phase: str | None, epoch: int | None) -> tuple[str, tuple[str | int, ...]]:
    """Returns ` WHERE ...` and its values; empty where nothing is asked for."""
    given = {"phase": phase, "epoch": epoch}
    terms = {name: value for name, value in given.items() if value is not None}
    where = f" WHERE {' AND '.join(f'{name} = ?' for name in terms)}" if terms else ""
    return where, tuple(terms.values())


def _parse_job(row: dict[str, Any]) -> JobRow:
    ref, status = row["ref"], row["data"]
    return JobRow(
        row["job_key"],
        row["epoch"],
        row["backend"],
        row["status"],
        TrainingJobRef.model_validate(ref) if ref else None,
        TrainingJobStatus.model_validate(status) if status else None,
    )


@contextlib.contextmanager
def open_for_reading(database: Path) -> Iterator[sqlite3.Connection]:
    """Opens a journal without changing it."""
    # a folder that may not be written, such as an archive: without a write-ahead log beside it, the file is complete
    is_archive = not os.access(database.parent, os.W_OK) and not database.with_name(f"{database.name}-wal").exists()
    uri = database.absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?{'immutable=1' if is_archive else 'mode=ro'}", uri=True)
    try:
        connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # its process was killed while it created the file, before the write-ahead log: only a writer can roll that back
        connection = sqlite3.connect(f"{uri}?mode=rw", uri=True)
    with contextlib.closing(connection):
        yield connection
