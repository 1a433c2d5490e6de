"""What a run folder tells of its run, read without changing it.

its lock is held                       -> running
the record cannot be read              -> damaged
it says running, and nobody holds it   -> interrupted
else                                   -> completed | stopped | failed | cancelled, as the record says
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import yaml

from reinforge.errors import ConfigError, Problem, ReinforgeError, StorageError, boundary
from reinforge.files import STAGED, TRASH, remove_folder
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal import LOCK, owner_of, read_rows
from reinforge.runs.journal_writer import SCHEMA_VERSION
from reinforge.runs.summary import RunSummary, load_summary
from reinforge.runs.validations import BASELINE

RUNNING, INTERRUPTED, DAMAGED, COMPLETED = "running", "interrupted", "damaged", "completed"
NOT_BEGUN = "it was stopped before it began"

OUR_PARTS = {"epoch", "openpipe_art_trainer", "group", "openpipe_art_traj_builder"}
"""Trainers and builders whose runs go on between epochs; any other is run again as a whole."""

HALF_REMOVED = re.compile(rf"{re.escape(TRASH)}.+-\d+-\d+")
"""Name of a run folder whose removal was cut short."""


@dataclass
class RunRecord:
    """What the journal of a run holds, besides its episodes.

    Attributes:
        facts: As `RunStore.set_run` was given them; empty: the run was stopped before it began.
        sessions: One for each process that worked on it.
        stages: `epoch`, `stage`, `at_s`, `data`, in the order they ended.
        jobs: `job_key`, `epoch`, `backend`, `status`.
        validations: The rows of `validation_history.json`, the baseline first.
        versions: `version`, `fingerprint`, `num_updates`, `checkpoint`.
        snapshots: `epoch`, `version`, `checkpoint`, the newest first.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)

    @property
    def epochs_done(self) -> int | None:
        """Epochs from whose end the run can go on; None where that is not known (a trainer of the user's own)."""
        last = max((row["epoch"] for row in self.snapshots), default=BASELINE)
        return None if last == BASELINE and self.facts.get("status") == COMPLETED else last + 1


def read_record(folder: Path) -> RunRecord:
    """Returns what the journal of a run holds.

    Raises:
        StorageError: It cannot be read, or has another version's format.
    """
    with boundary(StorageError, f"reading {folder / 'run.sqlite'}"):
        [[version]] = read_rows(folder, "PRAGMA user_version")
        if version not in (0, SCHEMA_VERSION):
            message = f"{folder / 'run.sqlite'} has the format {version}, this version reads {SCHEMA_VERSION}"
            raise StorageError(message)
        if version == 0:
            return RunRecord()

        def rows(names: str, rest: str) -> list[dict[str, Any]]:
            return [dict(zip(names.split(), row, strict=True)) for row in read_rows(folder, _query(names, rest))]

        stages = rows("epoch stage at_s data", "stages ORDER BY id")
        return RunRecord(
            facts={row["key"]: json.loads(row["value"]) for row in rows("key value", "run")},
            sessions=rows("id started_s pid host resumed_after ended_s ended", "sessions ORDER BY id"),
            stages=[{**row, "data": json.loads(row["data"])} for row in stages],
            jobs=rows("job_key epoch backend status", "jobs ORDER BY epoch"),
            validations=[json.loads(row["data"]) for row in rows("data", "validations ORDER BY epoch")],
            versions=rows("version fingerprint num_updates checkpoint", "policy_versions ORDER BY version"),
            snapshots=rows("epoch version checkpoint", "snapshots ORDER BY epoch DESC"),
        )


def _query(names: str, rest: str) -> str:
    return f"SELECT {', '.join(names.split())} FROM {rest}"


@dataclass
class RunOverview:
    """One run in a few figures.

    Attributes:
        folder: The run folder; its name is the run's.
        status: See the table at the head of this module.
        reason: Why it ended, or what is wrong with it; may be empty.
        owner: The process that works on it; None: nobody.
        epochs_done, num_epochs: Of those planned; None: not known.
        begun_s, ended_s: Seconds since the epoch, of the first and the last session.
        num_bytes: What the folder holds.
        summary: As the run ended; None: it has not, or that cannot be read.
        record: The journal; None: it cannot be read.
    """

    folder: Path
    status: str = DAMAGED
    reason: str = ""
    owner: str | None = None
    epochs_done: int | None = None
    num_epochs: int | None = None
    begun_s: float | None = None
    ended_s: float | None = None
    num_bytes: int = 0
    summary: RunSummary | None = None
    record: RunRecord | None = None

    @property
    def rewards(self) -> tuple[float | None, float | None]:
        """Mean reward of the baseline and of the last validation on `select`; None: not known."""
        rows = self.record.validations if self.record is not None else []
        known: list[float | None] = [row.get("avg_reward") for row in rows]
        return (known[0] if known else None, known[-1] if len(known) > 1 else None)

    @property
    def goes_on_with(self) -> str | None:
        """Returns the command that goes on with the run; None: it is done, runs, or cannot go on."""
        if self.status in (RUNNING, COMPLETED, DAMAGED) or self.record is None or not self.record.facts:
            return None
        return f"reinforge finetune --resume {shlex.quote(str(self.folder))}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures, ready for JSON."""
        baseline, last = self.rewards
        improvement = self.summary.improvement if self.summary is not None else None
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "owner": self.owner,
            "epochs_done": self.epochs_done,
            "num_epochs": self.num_epochs,
            "baseline": baseline,
            "last": last,
            "improvement": improvement.as_dict() if improvement is not None else None,
            "promoted": self.summary.promoted if self.summary is not None else None,
            "begun": iso(self.begun_s),
            "ended": iso(self.ended_s),
            "num_bytes": self.num_bytes,
            "resume": self.goes_on_with,
        }


def read_overview(folder: Path) -> RunOverview:
    """Returns a run in a few figures; one that cannot be read is `damaged`, with the reason."""
    planned = read_config(folder).get("finetuning", {}).get("num_epochs")
    made = RunOverview(folder, num_bytes=num_bytes(folder), num_epochs=planned)
    made.owner = owner_of(folder) if is_in_use(folder) else None
    try:
        made.record = read_record(folder)
    except StorageError as error:
        made.reason = str(error)
        return made
    facts, sessions = made.record.facts, made.record.sessions
    made.status, made.reason = str(facts.get("status", INTERRUPTED)), str(facts.get("reason", ""))
    if made.owner is not None:
        made.status, made.reason = RUNNING, ""
    elif not facts:
        made.reason = NOT_BEGUN
    elif made.status == RUNNING:
        made.status, made.reason = INTERRUPTED, "the process that ran it ended without a word"
    else:
        try:
            made.summary = load_summary(folder)
        except ReinforgeError as error:
            made.reason = made.reason or str(error)
    made.epochs_done = made.record.epochs_done
    if sessions:
        made.begun_s, made.ended_s = sessions[0]["started_s"], sessions[-1]["ended_s"]
    return made


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the resolved configuration of a run; empty where it cannot be read."""
    try:
        found = yaml.safe_load((folder / "config.yml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("finetuning"), dict) else {}


def is_in_use(folder: Path) -> bool:
    """True if a process works on a run: it holds the lock of the folder."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:  # a shared lock, given back at once: looking neither makes the file nor changes it
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def half_removed(output_dir: Path) -> list[Path]:
    """Returns what is left of run folders whose removal was cut short."""
    folder = output_dir.expanduser()
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted(path for path in found if HALF_REMOVED.fullmatch(path.name) and path.is_dir())


def read_runs(output_dir: Path) -> list[RunOverview]:
    """Returns every run below a folder, the one begun last at the end."""
    return [read_overview(folder) for folder in list_runs(output_dir)]


def remove_run(folder: Path) -> None:
    """Removes a run folder, while holding its lock.

    Raises:
        ConfigError: It is a link.
        StorageError: A process works on it, or it cannot be removed.
    """
    refuse_removal(folder)
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StorageError(f"the run folder {folder} is in use by {owner_of(folder)}; nothing was removed") from None
    except OSError as cause:
        raise StorageError(f"locking {folder}: {cause}") from cause
    try:
        remove_folder(folder)
    finally:
        lock.release()


def refuse_removal(folder: Path) -> None:
    """Raises an error where a run folder is a link or in use."""
    if folder.is_symlink():
        raise ConfigError(Problem("", f"{folder} is a link", f"remove {folder.resolve()} by its own path"))
    if is_in_use(folder):
        raise StorageError(f"the run folder {folder} is in use by {owner_of(folder)}; stop that first")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where `--resume` goes on.

    Attributes:
        epoch: After this epoch; -1: before the first.
        checkpoint: With these weights; None: those that the backend holds.
        is_known: False: the journal does not know the checkpoint yet; it will be adopted.
    """

    epoch: int
    checkpoint: str | None
    is_known: bool = True

    def __str__(self) -> str:
        return f"{after_epoch(self.epoch)}, with {self.checkpoint or 'the weights that its backend holds'}"


def after_epoch(epoch: int) -> str:
    """Returns `after epoch 3`, or for -1 `before the first epoch`."""
    return "before the first epoch" if epoch == BASELINE else f"after epoch {epoch}"


def resume_point(folder: Path, record: RunRecord, is_whole: Callable[[str], bool]) -> ResumePoint | None:
    """Returns where `--resume` goes on, as `resume.choose_snapshot` does; None: it begins again.

    Args:
        folder: The run folder.
        record: Its journal.
        is_whole: Whether a checkpoint can be used.
    """
    checkpoints = Checkpoints(folder)
    points = [ResumePoint(row["epoch"], row["checkpoint"]) for row in record.snapshots]
    newest = points[0].epoch if points else BASELINE - 1
    if not has_own_parts(folder):
        states = ((name, checkpoints.state(name)) for name in checkpoints.all())
        points += [ResumePoint(state["epoch"], name, False) for name, state in states if state and "epoch" in state]
        points = [point for point in points if point.is_known or point.epoch > newest]
    else:
        points = [point for point in points if point.epoch == BASELINE]
    for point in sorted(points, key=lambda each: -each.epoch):
        if point.checkpoint is None or is_whole(point.checkpoint):
            return point
    return None


def has_own_parts(folder: Path) -> bool:
    """True if the run's trainer or builder is none of ours, so that each call of it is run again as a whole."""
    config = read_config(folder)
    try:
        chosen = config["finetuning"]
        parts = (("trainers", chosen["trainer"]), ("trajectory_builders", chosen["trajectory_builder"]))
        return any(config[section][name]["_type"] not in OUR_PARTS for section, name in parts)
    except (KeyError, TypeError):
        return False


def num_bytes(folder: Path) -> int:
    """Returns how much a folder holds; a file that is there twice (a hard link) counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except OSError:  # removed meanwhile
            continue
        if not path.is_dir():
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def leftovers(folder: Path) -> Iterable[Path]:
    """Yields what a process that is gone was writing or removing in a run folder."""
    for place in (folder, folder / "checkpoints", folder / "episodes"):
        if place.is_dir():
            yield from sorted(p for p in place.iterdir() if p.name.startswith((STAGED, TRASH)) or _is_half_file(p))


def _is_half_file(path: Path) -> bool:
    return path.is_file() and re.fullmatch(r"\..+\.tmp-\d+", path.name) is not None


def iso(seconds: float | None) -> str | None:
    """Returns a time in UTC, as `2026-01-01T12:00:00+00:00`; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(round(seconds), UTC).isoformat()


def local_time(seconds: float | None) -> str:
    """Returns a time where we are, as `2026-01-01 12:00:00`; empty where it is not known."""
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def size_text(count: int) -> str:
    """Returns `512 B`, `3.4 MiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def list_runs(output_dir: Path) -> list[Path]:
    """Returns the run folders below a folder, the one begun last at the end."""
    paths = output_dir.expanduser().glob("*/run.sqlite")
    found = [path.parent for path in paths if not path.parent.name.startswith(TRASH)]
    return sorted(found, key=lambda folder: (_begun_s(folder), folder.name))


def _begun_s(folder: Path) -> float:
    try:
        [[begun_s]] = read_rows(folder, "SELECT min(started_s) FROM sessions")
        return float(begun_s if begun_s is not None else (folder / "run.sqlite").stat().st_mtime)
    except Exception:  # noqa: BLE001  a damaged run is still listed, as the oldest
        return 0.0
