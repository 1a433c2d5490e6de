"""The status of the runs in an output directory, read without changing them.

a process holds the lock                         -> running
the journal cannot be read                       -> damaged
the journal says running, but no process is      -> interrupted
else                                             -> completed | stopped | failed | cancelled, as the journal says
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock

from reinforge.config.document import parse_yaml
from reinforge.errors import ConfigError, Problem, ReinforgeError, StorageError, describe_error, did_you_mean
from reinforge.files import STAGED, TRASH, find_json, read_regular_file, write_json
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.journal import LOCK, describe_owner
from reinforge.runs.journal.reader import JOURNAL, JournalReader
from reinforge.runs.rows import BASELINE, JobRow, PolicyVersion, Session, SnapshotRow, StageRow, ValidationRow
from reinforge.runs.summary import RunSummary, describe_resume, load_summary

RUNNING, INTERRUPTED, DAMAGED, COMPLETED = "running", "interrupted", "damaged", "completed"
LABELS = ".labels.json"
"""The file of a run folder with the tags and the note that a user gave it; not in the manifest, since it may change."""
MAX_TAGS, MAX_LABEL = 20, 500  # tags of a run, and characters of a tag or a note
NOT_STARTED = "the run stopped during startup"
PARTIAL_FILE = re.compile(r"\..+\.tmp-\d+")
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
RESERVED_NAMES = {"last"}
KILLED = "the process was killed, or the machine went down"


@dataclass
class RunRecord:
    """What the journal of a run holds, besides its episodes."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Of `RunJournal.set_facts`; empty: it was stopped before it started."""
    sessions: list[Session] = field(default_factory=list)
    stages: list[StageRow] = field(default_factory=list)
    jobs: list[JobRow] = field(default_factory=list)
    validations: list[ValidationRow] = field(default_factory=list)  # the baseline first
    versions: list[PolicyVersion] = field(default_factory=list)  # the oldest first
    snapshots: list[SnapshotRow] = field(default_factory=list)  # the newest first

    @property
    def epochs_done(self) -> int | None:
        """Number of finished epochs; None: not known, since a user's own trainer ran them."""
        last = max((row.epoch for row in self.snapshots), default=BASELINE)
        return None if last == BASELINE and self.facts.get("status") == COMPLETED else last + 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "facts": self.facts,
            "sessions": [asdict(row) for row in self.sessions],
            "stages": [asdict(row) for row in self.stages],
            "jobs": [
                {"job_key": row.job_key, "epoch": row.epoch, "backend": row.backend, "status": row.state}
                for row in self.jobs
            ],
            "validations": [row.as_dict() for row in self.validations],
            "versions": [asdict(row) for row in self.versions],
            "snapshots": [asdict(row) for row in self.snapshots],
        }


def check_run_name(name: str, argument: str = "--run_name") -> None:
    """Raises `ConfigError` if a name cannot be that of a run: of its folder, on the command line and in messages."""
    allowed = "use up to 128 letters (a-z, A-Z), digits, -, _ and dots; the first one a letter or a digit"
    if name in RESERVED_NAMES:
        message = f'"{name}" cannot be the name of a run: it means the run that was started last'
        raise ConfigError(Problem(argument, message, "choose another name"))
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(Problem(argument, f"{name!r} cannot be the name of a run", allowed))


def read_record(folder: Path) -> RunRecord:
    reader = JournalReader(folder)
    if reader.is_empty():
        return RunRecord()
    return RunRecord(
        facts=reader.facts(),
        sessions=reader.sessions(),
        stages=reader.stages(),
        jobs=reader.jobs(),
        validations=reader.validations(),
        versions=reader.policy_versions(),
        snapshots=reader.snapshot_rows(),
    )


@dataclass
class RunOverview:
    """A run at a glance; None is what is not known."""

    folder: Path
    status: str = DAMAGED  # see the table at the head of this module
    reason: str = ""  # why it ended, or what is wrong with it; may be empty
    owner: str | None = None  # the process that works on it
    epochs_done: int | None = None
    num_epochs: int | None = None
    started_s: float | None = None  # the first session, in seconds since the Unix epoch
    ended_s: float | None = None  # the last session
    num_bytes: int = 0
    summary: RunSummary | None = None  # how the run ended; None: it has not ended, or the summary cannot be read
    record: RunRecord | None = None  # the journal; None: it cannot be read
    tags: list[str] = field(default_factory=list)  # words that a user gave it
    note: str = ""

    @property
    def rewards(self) -> tuple[float | None, float | None]:
        """Mean reward of the baseline and of the last validation; None: not known."""
        rows = self.record.validations if self.record is not None else []
        known = [row.avg_reward for row in rows]
        return (known[0] if known else None, known[-1] if len(known) > 1 else None)

    @property
    def epochs(self) -> str:
        """Returns `3 of 20`, with `?` for what is not known."""
        done, planned = ("?" if count is None else str(count) for count in (self.epochs_done, self.num_epochs))
        return f"{done} of {planned}"

    @property
    def resume_command(self) -> str | None:
        """What resumes the run, a command or Python code; None: it is completed, running, or cannot be resumed."""
        if self.status in (RUNNING, COMPLETED, DAMAGED) or self.record is None or not self.record.facts:
            return None
        if not self.record.facts.get("can_resume", True):
            return None
        return describe_resume(self.folder)

    def as_dict(self) -> dict[str, Any]:
        """Returns the overview, ready for JSON."""
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
            "started": format_utc(self.started_s),
            "ended": format_utc(self.ended_s),
            "num_bytes": self.num_bytes,
            "tags": self.tags,
            "note": self.note,
            "resume": self.resume_command,
        }


def read_overview(folder: Path) -> RunOverview:
    """Returns a run at a glance; one that cannot be read is `damaged`, with the reason."""
    planned = read_config(folder).get("finetuning", {}).get("num_epochs")
    num_epochs = planned if isinstance(planned, int) else None
    overview = RunOverview(folder, num_bytes=measure_size(folder), num_epochs=num_epochs)
    overview.tags, overview.note = read_labels(folder)
    overview.owner = describe_owner(folder) if is_in_use(folder) else None
    try:
        overview.record = read_record(folder)
    except StorageError as error:
        overview.reason = str(error)
        return overview
    facts, sessions = overview.record.facts, overview.record.sessions
    overview.status, overview.reason = str(facts.get("status", INTERRUPTED)), str(facts.get("reason", ""))
    if overview.owner is not None:
        overview.status, overview.reason = RUNNING, ""
    elif lost := JournalReader(folder).find_lost_log():
        overview.record, overview.status, overview.reason = None, DAMAGED, f"{folder / JOURNAL}: {lost[0]}"
        return overview
    elif not facts:
        overview.reason = NOT_STARTED
    elif overview.status == RUNNING:
        overview.status, overview.reason = INTERRUPTED, KILLED
    else:
        try:
            overview.summary = load_summary(folder)
        except ReinforgeError as error:
            overview.reason = overview.reason or str(error)
    overview.epochs_done = overview.record.epochs_done
    if sessions:
        overview.started_s, overview.ended_s = _to_seconds(sessions[0].started_s), _to_seconds(sessions[-1].ended_s)
    return overview


def read_labels(folder: Path) -> tuple[list[str], str]:
    """Returns the tags and the note of a run; empty where it has none, or none that can be read."""
    found = find_json(folder / LABELS)
    labels = found if isinstance(found, dict) else {}
    tags, note = labels.get("tags"), labels.get("note")
    words = [str(tag)[:MAX_LABEL] for tag in tags[:MAX_TAGS]] if isinstance(tags, list) else []
    return words, note[:MAX_LABEL] if isinstance(note, str) else ""


def write_labels(folder: Path, tags: Sequence[str], note: str) -> None:
    write_json(folder / LABELS, {"tags": list(dict.fromkeys(tags))[:MAX_TAGS], "note": note[:MAX_LABEL]})


def _to_seconds(value: Any) -> float | None:
    """Returns a time of a row that may come from anywhere, if it is one that can be shown."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e11 else None


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the resolved configuration of a run; empty where it cannot be read."""
    try:
        found = parse_yaml(read_regular_file(folder / "config.yml").decode()).data
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("finetuning"), dict) else {}


def is_in_use(folder: Path) -> bool:
    """Returns True if a process works on a run: it holds the lock of the folder. Creates and changes no file."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except ImportError:  # Windows
        return not can_lock(path)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def can_lock(path: Path) -> bool:
    """Returns True if no process holds the lock of a file that exists."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    lock.release()
    return True


def read_runs(output_dir: Path) -> list[RunOverview]:
    """Returns every run in a folder, the latest one last; one that cannot be read is `damaged`, with the reason."""
    return [read_overview_of_any(folder) for folder in list_runs(output_dir)]


def read_overview_of_any(folder: Path) -> RunOverview:
    """Returns a run at a glance, whatever stands in its folder; one that cannot be read is `damaged`."""
    try:
        return read_overview(folder)
    except Exception as error:  # noqa: BLE001  a folder from elsewhere may hold anything, and the others are listed
        return RunOverview(folder, reason=f"it cannot be read: {describe_error(error)}")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where `--resume` resumes."""

    epoch: int  # the last finished epoch; -1: none is finished
    checkpoint: str | None  # the checkpoint with its weights; None: the weights are on the backend
    is_known: bool = True  # False: the checkpoint is not in the journal yet; it will be adopted

    def __str__(self) -> str:
        return f"{describe_position(self.epoch)} from {self.checkpoint or 'the weights on the backend'}"


def describe_position(epoch: int) -> str:
    return "at epoch 0" if epoch == BASELINE else f"after epoch {epoch}"


def find_resume_point(folder: Path, record: RunRecord, is_intact: Callable[[str], bool]) -> ResumePoint | None:
    """Returns where `--resume` resumes, as `resume.choose_snapshot` does; None: it restarts from the beginning."""
    checkpoints = Checkpoints(folder)
    points = [ResumePoint(row.epoch, row.checkpoint) for row in record.snapshots]
    newest = points[0].epoch if points else BASELINE - 1
    if record.facts.get("resumes_epochs", True):  # false: the trainer or the builder repeats the training as a whole
        states = ((name, checkpoints.read_state(name)) for name in checkpoints.names())
        points += [ResumePoint(state["epoch"], name, False) for name, state in states if state and "epoch" in state]
        points = [point for point in points if point.is_known or point.epoch > newest]
    else:
        points = [point for point in points if point.epoch == BASELINE]
    for point in sorted(points, key=lambda each: -each.epoch):
        if point.checkpoint is None or is_intact(point.checkpoint):
            return point
    return None


def measure_size(folder: Path) -> int:
    """Returns the size of a folder in bytes; a file with several hard links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except OSError:  # removed in the meantime
            continue
        if not path.is_dir():
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def find_leftovers(folder: Path) -> Iterable[Path]:
    for place in (folder, folder / "checkpoints", folder / "episodes"):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if path.name.startswith((STAGED, TRASH)) or (path.is_file() and PARTIAL_FILE.fullmatch(path.name)):
                    yield path


def format_utc(seconds: float | None) -> str | None:
    """Returns a time in UTC, as `2026-01-01T12:00:00+00:00`; None stays None."""
    return None if seconds is None else datetime.fromtimestamp(round(seconds), UTC).isoformat()


def format_local_time(seconds: float | None) -> str:
    """Returns a time in the local time zone, as `2026-01-01 12:00:00`; empty if unknown."""
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def format_size(count: int) -> str:
    """Returns `512 B`, `3.4 MiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def find_run_folders(output_dir: Path) -> list[Path]:
    paths = output_dir.expanduser().glob(f"*/{JOURNAL}")
    return sorted(path.parent for path in paths if path.is_file() and not path.parent.name.startswith(TRASH))


def list_runs(output_dir: Path) -> list[Path]:
    return sorted(find_run_folders(output_dir), key=_find_start_s)


def find_run(name: str, output_dir: Path) -> Path:
    """Returns the folder of a run by its name or folder; `last` is the one started last.

    Raises:
        ConfigError: There is no such run.
    """
    output_dir = output_dir.expanduser()
    runs = list_runs(output_dir)
    if name == "last" and runs:
        return runs[-1]
    for folder in (Path(name).expanduser(), output_dir / name):
        if (folder / "run.sqlite").is_file():
            return folder
    names = [run.name for run in runs]
    there = f"the newest runs in {output_dir} are {', '.join(names[-5:])}" if names else f"{output_dir} has no runs"
    message = f'there is no run "{name}"{did_you_mean(name, names)}'
    raise ConfigError(Problem("", message, f"name a run or its folder; {there}"))


def _find_start_s(folder: Path) -> float:
    try:
        sessions = JournalReader(folder).sessions()
        started_s = _to_seconds(sessions[0].started_s) if sessions else (folder / JOURNAL).stat().st_mtime
        return started_s or 0.0
    except Exception:  # noqa: BLE001  a damaged run is still listed, as the oldest
        return 0.0
