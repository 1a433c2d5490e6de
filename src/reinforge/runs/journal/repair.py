"""Checks every row of a journal, and rebuilds a damaged one from what is whole.

rows          those whose checksum agrees; read from both ends around a broken page
metrics       what is missing, from training_metrics.jsonl      validations   from validation_history.json
snapshots     what is missing, from the checkpoints' own state

A run resumes from the newest snapshot for which everything before it is there. The damaged file is kept.

Before a resume every row is checked, but of a large journal only the newest episodes: a million take minutes to read,
and the others are compared with their checksums when something reads them. If that finds damage, the run notes it in
the file `.damaged` and stops, and the next resume checks every row.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.bounded import load_json
from reinforge.errors import StorageError
from reinforge.files import PRIVATE_FILE, make_staging_path, read_json_file, read_lines, storage_boundary, to_json
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.journal import lock_run
from reinforge.runs.journal.reader import (
    DAMAGE_MARK,
    DATABASE_ERRORS,
    JOURNAL,
    REPAIR_NOTES,
    JournalReader,
    is_damage,
    open_for_reading,
)
from reinforge.runs.journal.schema import (
    SCHEMA_VERSION,
    check_rows,
    create_tables,
    insert_row,
    read_columns,
    read_tables,
)
from reinforge.runs.manifest import GROWING, unlist
from reinforge.runs.rows import BASELINE

EPISODES = "episodes"  # the table that grows with the run; all others grow with its epochs

UNUSED = "unused-"
"""Prefix of a checkpoint that is newer than what the journal still knows; its epochs are trained again."""

MAX_PROBLEMS = 10

MAX_WHOLE_BYTES = 128 * 2**20  # a larger journal is not read as a whole before each resume
NEWEST_EPISODES = 20_000  # episodes of a larger one that are checked then


@dataclass
class JournalCheck:
    """What a check of every row found: at most about ten problems, and the number of intact rows and episodes."""

    problems: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_episodes: int = 0


def check_journal(folder: Path, *, newest: int | None = None) -> JournalCheck:
    """Returns what is wrong with the journal of a run; reads and checks every row.

    A journal of another format is not checked: opening it is refused.

    Args:
        newest: Of the episodes, check only so many, those that were recorded last; None: all.
    """
    found = JournalCheck()
    try:
        with open_for_reading(folder / JOURNAL) as db:
            _check_database(db, found, newest)
    except DATABASE_ERRORS as error:
        if not is_damage(error):
            raise StorageError(f"cannot read {folder / JOURNAL}: {type(error).__name__}: {error}") from error
        found.problems.append(f"{type(error).__name__}: {error}")
    if not found.problems:
        with contextlib.suppress(StorageError):  # it has another format
            found.problems += JournalReader(folder).find_lost_log()
    return found


def _check_database(db: sqlite3.Connection, found: JournalCheck, newest: int | None) -> None:
    [version] = db.execute("PRAGMA user_version").fetchone()
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        create_tables(new)
        is_ours = read_tables(db) == read_tables(new)
    if version in (0, SCHEMA_VERSION):
        for part in [str(MAX_PROBLEMS)] if newest is None else [name for name in read_columns() if name != EPISODES]:
            found.problems += [str(line) for (line,) in db.execute(f"PRAGMA integrity_check({part})") if line != "ok"]
    if version != SCHEMA_VERSION:
        if is_ours:
            found.problems.append(f"its format is {version}, but its tables are those of format {SCHEMA_VERSION}")
        return
    if not is_ours:
        found.problems.append("the definitions of its tables were changed")
        return
    for table in read_columns():
        for row in check_rows(db, table, newest=newest if table == EPISODES else None):
            if row.problem is not None:
                if len(found.problems) < MAX_PROBLEMS:
                    found.problems.append(f"{row.name}: {row.problem}")
                continue
            found.num_rows += 1
            found.num_episodes += table == EPISODES


def repair_journal(folder: Path) -> bool:
    """Rebuilds the journal of a run if it is damaged; True: it was, and the fact `repair_notes` says what is lost."""
    lock = lock_run(folder)
    try:
        found = check_journal(folder, newest=_choose_extent(folder))
        if found.problems:
            with storage_boundary(folder / JOURNAL):
                _Repair(folder, found.problems).run()
        (folder / DAMAGE_MARK).unlink(missing_ok=True)
        return bool(found.problems)
    finally:
        lock.release()


def _choose_extent(folder: Path) -> int | None:
    """Returns how many of the newest episodes are checked before a resume; None: all."""
    database = folder / JOURNAL
    is_large = database.is_file() and database.stat().st_size > MAX_WHOLE_BYTES
    return NEWEST_EPISODES if is_large and not (folder / DAMAGE_MARK).exists() else None


class _Repair:
    """One rebuild of a journal, whose folder this process has locked."""

    def __init__(self, folder: Path, problems: list[str]):
        self.folder, self.problems, self.checkpoints = folder, problems, Checkpoints(folder)
        self.lost_validations: set[int] = set()
        self.num_rows = self.num_lost = 0

    def run(self) -> None:
        staged = make_staging_path(self.folder)
        unlist(self.folder, GROWING)
        try:
            staged.touch(PRIVATE_FILE)
            with contextlib.closing(sqlite3.connect(staged, isolation_level=None)) as new:
                create_tables(new)
                new.execute("BEGIN")
                for table in read_columns():
                    self._copy_rows(new, table)
                self._add_from_files(new)
                newest = self._drop_unusable(new)
                kept = self._choose_name()
                self._record_notes(new, kept, newest)
                new.execute("COMMIT")
            self._set_aside_checkpoints(newest)
            self._replace(staged, kept)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def _copy_rows(self, new: sqlite3.Connection, table: str) -> None:
        """Copies the whole rows of a table; a page that cannot be read is approached from both ends."""
        for backwards in (False, True):
            try:
                with open_for_reading(self.folder / JOURNAL) as old:
                    for row in check_rows(old, table, backwards=backwards):
                        if row.problem is None:
                            insert_row(new, table, **{name: _decode(value) for name, value in row.values.items()})
                            self.num_rows += 1
                        else:
                            self.num_lost += 1
                            if table == "validations":
                                self.lost_validations |= _find_epochs(row.values)
            except DATABASE_ERRORS as error:
                if not is_damage(error):
                    raise
                if table == "validations" and backwards:
                    self.lost_validations.add(BASELINE)
                continue
            return

    def _add_from_files(self, new: sqlite3.Connection) -> None:
        """Adds what the journal has lost and a file of the run folder still has."""
        for row in _read_rows(self.folder / "training_metrics.jsonl"):
            insert_row(new, "metrics", keep_existing=True, epoch=row["epoch"], data=to_json(row))
        for row in _read_rows(self.folder / "validation_history.json"):
            insert_row(new, "validations", keep_existing=True, epoch=row["epoch"], data=to_json(row))
            if row["epoch"] == BASELINE:  # the file has all validations or is not there
                self.lost_validations.clear()
        for name in self.checkpoints.names():
            state = self._read_state(name)
            if state is None:
                continue
            row = {"epoch": state["epoch"], "version": state["version"], "checkpoint": name, "data": to_json(state)}
            insert_row(new, "snapshots", keep_existing=True, at_s=(self.folder / name).stat().st_mtime, **row)
            if isinstance(version := state.get("newest_version"), dict):
                row = {**version, "at_s": (self.folder / name).stat().st_mtime}
                insert_row(new, "policy_versions", keep_existing=True, **row)

    def _read_state(self, name: str) -> dict[str, Any] | None:
        state = self.checkpoints.read_state(name)
        is_usable = state is not None and isinstance(state.get("epoch"), int) and "version" in state
        return state if is_usable and self.checkpoints.find_damage(name) is None else None

    def _drop_unusable(self, new: sqlite3.Connection) -> int:
        """Removes the snapshots from which the run cannot resume; returns the epoch of the newest one that is left."""
        metrics = {epoch for (epoch,) in new.execute("SELECT epoch FROM metrics")}
        versions = {version for (version,) in new.execute("SELECT version FROM policy_versions")}
        jobs = {epoch for (epoch,) in new.execute("SELECT epoch FROM jobs WHERE data IS NOT NULL")}
        newest = BASELINE - 1
        for epoch, version, data in new.execute("SELECT epoch, version, data FROM snapshots ORDER BY epoch").fetchall():
            state = json.loads(data)
            is_ours, adopts = state.get("trainer") is not None, bool(state.get("adopt"))
            is_usable = (
                epoch <= min(self.lost_validations, default=epoch)
                and (not is_ours or metrics >= set(range(epoch)))
                and (not adopts or epoch in jobs or bool(state.get("status")))
                and (not adopts or version is None or version - 1 in versions)
            )
            if is_usable:
                newest = epoch
            else:
                new.execute("DELETE FROM snapshots WHERE epoch = ?", (epoch,))
        return newest

    def _record_notes(self, new: sqlite3.Connection, kept: Path, newest: int) -> None:
        lost = f"{self.num_lost} damaged rows" if self.num_lost else "what could not be read"
        notes = [
            f"the journal was damaged ({self.problems[0]}): it was rebuilt from its {self.num_rows:,} intact rows and "
            f"the files beside it, without {lost}; the damaged one is {kept.name}"
        ]
        notes += [
            f"setting {name} aside: the journal no longer has everything before it" for name in self._later(newest)
        ]
        insert_row(new, "run", keep_existing=True, key="run_id", value=to_json(self.folder.name))
        insert_row(new, "run", key=REPAIR_NOTES, value=to_json(notes))

    def _later(self, newest: int) -> list[str]:
        states = {name: self.checkpoints.read_state(name) or {} for name in self.checkpoints.names()}
        return [name for name, state in states.items() if state.get("epoch", BASELINE) > newest]

    def _set_aside_checkpoints(self, newest: int) -> None:
        for name in self._later(newest):
            path = self.folder / name
            os.rename(path, path.with_name(f"{UNUSED}{path.name}"))

    def _choose_name(self) -> Path:
        names = (f"{JOURNAL}.damaged{'' if number == 1 else f'-{number}'}" for number in range(1, 1000))
        return next(self.folder / name for name in names if not (self.folder / name).exists())

    def _replace(self, staged: Path, kept: Path) -> None:
        """Puts the new journal in place of the damaged one, which is kept with its write-ahead log."""
        for suffix in ("", "-wal"):
            source = self.folder / f"{JOURNAL}{suffix}"
            if source.exists():
                os.link(source, kept.with_name(f"{kept.name}{suffix}"))
        for suffix in ("-wal", "-shm"):  # before the new file comes: SQLite would take the old log for its own
            (self.folder / f"{JOURNAL}{suffix}").unlink(missing_ok=True)
        os.replace(staged, self.folder / JOURNAL)


def _decode(value: Any) -> Any:
    return value.decode() if isinstance(value, bytearray) else value


def _find_epochs(values: dict[str, Any]) -> set[int]:
    found = {values["epoch"]}
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found.add(load_json(values["data"])["epoch"])
    return {epoch for epoch in found if isinstance(epoch, int)}


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        found = read_lines(path) if path.suffix == ".jsonl" else read_json_file(path)
    except (OSError, ValueError):
        return
    for row in found if isinstance(found, list) else []:
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            yield row
