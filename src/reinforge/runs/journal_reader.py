"""Reads the journal of a run, whose process may be working, stopped or dead, without locking or changing it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError, boundary
from reinforge.runs.journal_schema import SCHEMA_VERSION, can_upgrade, describe_format
from reinforge.runs.rows import (
    EpisodeRow,
    EpochMetrics,
    EpochSnapshot,
    JobRow,
    PolicyVersion,
    Session,
    SnapshotRow,
    StageRow,
    ValidationRow,
)
from reinforge.types.job import TrainingJobRef, TrainingJobStatus

JOURNAL = "run.sqlite"

_IS_DIALOGUE = "json_type(data, '$.output.protocol') = 'text' AND json_type(data, '$.output.branches') = 'array'"


class JournalReader:
    """The journal of a run as it stands on disk, as typed rows. An empty journal has no rows.

    Every method raises `StorageError` where the journal cannot be read, or has a format that must be upgraded first.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._has_tables = False

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.folder / JOURNAL

    def read_format(self) -> int:
        """Returns the format of the tables; 0: there are none, since the process died before it had created them."""
        [[version]] = self._fetch("PRAGMA user_version")
        return int(version)

    def is_empty(self) -> bool:
        """True if the journal has no tables yet.

        Raises:
            StorageError: Its format is not the current one.
        """
        if self._has_tables:
            return False
        found = self.read_format()
        if found not in (0, SCHEMA_VERSION):
            raise StorageError(describe_format(self.database, found))
        self._has_tables = found == SCHEMA_VERSION
        return not self._has_tables

    def find_damage(self) -> list[str]:
        """Returns what SQLite's own check finds wrong with the file; empty: nothing."""
        try:
            found = [str(row[0]) for row in self._fetch("PRAGMA quick_check")]
        except StorageError as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def facts(self) -> dict[str, Any]:
        """Returns the facts about the whole run, such as its status; empty: the run has not started.

        They can be read in every format up to the current one.
        """
        found = self.read_format()
        if found not in (0, SCHEMA_VERSION) and not can_upgrade(found):
            raise StorageError(describe_format(self.database, found))
        if found == 0:
            return {}
        return {key: json.loads(value) for key, value in self._fetch("SELECT key, value FROM run")}

    def sessions(self) -> list[Session]:
        """Returns every process that worked on the run, the first one first."""
        names = "id, started_s, pid, host, resumed_after, ended_s, ended"
        return [Session(*row) for row in self._rows(f"SELECT {names} FROM sessions ORDER BY id")]

    def stages(self) -> list[StageRow]:
        """Returns every stage that has ended, in that order."""
        rows = self._rows("SELECT epoch, stage, at_s, data FROM stages ORDER BY id")
        return [StageRow(epoch, stage, at_s, json.loads(data)) for epoch, stage, at_s, data in rows]

    def jobs(self) -> list[JobRow]:
        """Returns every job, in the order of their epochs."""
        rows = self._rows("SELECT job_key, epoch, backend, status, ref, data FROM jobs ORDER BY epoch")
        return [_parse_job(*row) for row in rows]

    def find_job(self, job_key: str) -> JobRow | None:
        """Returns one job; None: there is none of that name."""
        query = "SELECT job_key, epoch, backend, status, ref, data FROM jobs WHERE job_key = ?"
        found = self._rows(query, (job_key,))
        return _parse_job(*found[0]) if found else None

    def metrics(self, before: int) -> list[EpochMetrics]:
        """Returns the metrics of all epochs before one."""
        rows = self._rows("SELECT data FROM metrics WHERE epoch < ? ORDER BY epoch", (before,))
        return [EpochMetrics.from_dict(json.loads(data)) for (data,) in rows]

    def validations(self) -> list[ValidationRow]:
        """Returns every validation, the baseline first."""
        rows = self._rows("SELECT data FROM validations ORDER BY epoch")
        return [ValidationRow.from_dict(json.loads(data)) for (data,) in rows]

    def policy_versions(self) -> list[PolicyVersion]:
        """Returns every version of the weights, the oldest first."""
        names = "version, fingerprint, num_updates, checkpoint"
        return [PolicyVersion(*row) for row in self._rows(f"SELECT {names} FROM policy_versions ORDER BY version")]

    def snapshots(self) -> list[EpochSnapshot]:
        """Returns every snapshot with its state, the newest first."""
        rows = self._rows("SELECT epoch, version, checkpoint, data FROM snapshots ORDER BY epoch DESC")
        return [EpochSnapshot(epoch, version, name, json.loads(data)) for epoch, version, name, data in rows]

    def snapshot_rows(self) -> list[SnapshotRow]:
        """Returns every snapshot without its state, the newest first."""
        rows = self._rows("SELECT epoch, version, checkpoint FROM snapshots ORDER BY epoch DESC")
        return [SnapshotRow(*row) for row in rows]

    def count_episodes(self, phase: str | None = None, epoch: int | None = None) -> int:
        """Returns the number of recorded episodes, of a phase and an epoch if they are given."""
        where, values = _build_filter(phase, epoch)
        rows = self._rows(f"SELECT count(*) FROM episodes{where}", values)
        return int(rows[0][0]) if rows else 0

    def count_collected(self) -> dict[int, int]:
        """Returns the number of collected episodes by epoch."""
        return dict(self._rows("SELECT epoch, count(*) FROM episodes WHERE phase = 'collect' GROUP BY epoch"))

    def episode_texts(self, phase: str, epoch: int) -> dict[str, str]:
        """Returns the episodes of a phase of an epoch as key -> JSON."""
        query = "SELECT key, data FROM episodes WHERE phase = ? AND epoch = ?"
        return dict(self._rows(query, (phase, epoch)))

    def find_episode(self, key: str) -> EpisodeRow | None:
        """Returns an episode by its key; None: there is none."""
        found = self._rows("SELECT key, data FROM episodes WHERE key = ?", (key,))
        return _parse_episode_row(*found[0]) if found else None

    def episode_at(self, number: int, phase: str | None = None, epoch: int | None = None) -> EpisodeRow | None:
        """Returns an episode by its number, from 0 in the order they ended in, of a phase and an epoch if given."""
        where, values = _build_filter(phase, epoch)
        query = f"SELECT key, data FROM episodes{where} ORDER BY rowid LIMIT 1 OFFSET ?"
        found = self._rows(query, (*values, number))
        return _parse_episode_row(*found[0]) if found else None

    def episode_keys(self, limit: int, phase: str | None = None, epoch: int | None = None) -> list[str]:
        """Returns at most `limit` keys of episodes, of a phase and an epoch if they are given."""
        where, values = _build_filter(phase, epoch)
        return [key for (key,) in self._rows(f"SELECT key FROM episodes{where} LIMIT ?", (*values, limit))]

    def dialogues(self, phase: str, epoch: int | None = None, limit: int | None = None) -> list[EpisodeRow]:
        """Returns the episodes of multi-agent protocols, in the order of their keys.

        Args:
            phase: The phase of the episodes.
            epoch: Only this epoch; None: all.
            limit: At most this many; None: all.
        """
        where, values = _build_filter(phase, epoch)
        order = "ORDER BY epoch, example_id, generation, round LIMIT ?"
        query = f"SELECT key, data FROM episodes{where} AND {_IS_DIALOGUE} {order}"
        return [_parse_episode_row(*row) for row in self._rows(query, (*values, -1 if limit is None else limit))]

    def has_dialogues(self, phase: str, epoch: int | None, num_probed: int) -> bool:
        """True if one of the first `num_probed` episodes is of a multi-agent protocol."""
        where, values = _build_filter(phase, epoch)
        first = f"SELECT data FROM episodes{where} LIMIT {int(num_probed)}"
        return bool(self._rows(f"SELECT 1 FROM ({first}) WHERE {_IS_DIALOGUE} LIMIT 1", values))

    def outputs(self, phase: str) -> dict[str, Any]:
        """Returns what the agent returned in a phase, by example id: the first generation, without missing ones."""
        query = "SELECT example_id, data FROM episodes WHERE phase = ? AND generation = 0 ORDER BY example_id"
        outputs = {example: json.loads(data)["output"] for example, data in self._rows(query, (phase,))}
        return {example: output for example, output in outputs.items() if output is not None}

    def _rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return [] if self.is_empty() else self._fetch(query, parameters)

    def _fetch(self, query: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with boundary(StorageError, f"cannot read {self.database}"):
            return _fetch_rows(self.database, query, parameters)


def _build_filter(phase: str | None, epoch: int | None) -> tuple[str, tuple[str | int, ...]]:
    """Returns ` WHERE ...` and its values; empty where nothing is asked for."""
    given = {"phase": phase, "epoch": epoch}
    terms = {name: value for name, value in given.items() if value is not None}
    where = f" WHERE {' AND '.join(f'{name} = ?' for name in terms)}" if terms else ""
    return where, tuple(terms.values())


def _parse_job(job_key: str, epoch: int, backend: str | None, state: str, ref: str | None, data: str | None) -> JobRow:
    return JobRow(
        job_key,
        epoch,
        backend,
        state,
        TrainingJobRef.model_validate_json(ref) if ref else None,
        TrainingJobStatus.model_validate_json(data) if data else None,
    )


def _parse_episode_row(key: str, data: str) -> EpisodeRow:
    return EpisodeRow(key, json.loads(data))


def _fetch_rows(database: Path, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    # a folder that may not be written, such as an archive: without a write-ahead log beside it, the file is complete
    is_archive = not os.access(database.parent, os.W_OK) and not database.with_name(f"{JOURNAL}-wal").exists()
    uri = database.absolute().as_uri()
    try:
        return _fetch_from(f"{uri}?{'immutable=1' if is_archive else 'mode=ro'}", query, parameters)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # its process was killed while it created the file, before the write-ahead log: only a writer can roll that back
        return _fetch_from(f"{uri}?mode=rw", query, parameters)


def _fetch_from(uri: str, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        return connection.execute(query, parameters).fetchall()
