"""Whether a run folder holds what its journal says, bit for bit; nothing is changed.

database      quick_check and format                       checkpoints   every manifest, against the files beside it
snapshots     the checkpoints from which the run goes on   exports       one for each epoch, readable to its last line
left over     what a killed process was writing or removing, and what the journal does not know (yet)
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from reinforge.errors import ReinforgeError
from reinforge.files import MANIFEST, TRASH, damage
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal import read_rows
from reinforge.runs.run_folder import (
    COMPLETED,
    RUNNING,
    ResumePoint,
    RunOverview,
    RunRecord,
    after_epoch,
    leftovers,
    num_bytes,
    read_config,
    read_overview,
    resume_point,
    size_text,
)
from reinforge.runs.summary import load_summary
from reinforge.runs.validations import choose_best

NOTHING_NEEDS_IT = "nothing needs it"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        what: File or folder, relative to the run folder, or an entry of the journal.
        problem: What was found.
        mend: What mends it, as one sentence.
        is_damage: False: a rest that harms nothing.
    """

    what: str
    problem: str
    mend: str
    is_damage: bool = True


@dataclass
class Verification:
    """What looking through a run folder found.

    Attributes:
        overview: The run.
        checked: What was looked at -> what there is of it.
        findings: What is not as it should be.
        resume: Where `--resume` goes on; None: it begins again, or there is nothing to go on with.
    """

    overview: RunOverview
    checked: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    resume: ResumePoint | None = None

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged; rests that harm nothing may be there."""
        return not any(finding.is_damage for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Returns it, ready for JSON."""
        return {
            "sound": self.is_sound,
            "checked": self.checked,
            "findings": [asdict(finding) for finding in self.findings],
            "resume_point": asdict(self.resume) if self.resume is not None else None,
            "run": self.overview.as_dict(),
        }


def verify_run(folder: Path) -> Verification:
    """Looks through a run folder, reading every byte that it vouches for."""
    return _Check(folder).made


class _Check:
    """One look at a run folder; what a process that works on it may change at any moment is left out."""

    def __init__(self, folder: Path):
        self.folder, self.checkpoints = folder, Checkpoints(folder)
        self.made = Verification(read_overview(folder))
        self.is_running = self.made.overview.owner is not None
        self.is_done = self.made.overview.status == COMPLETED
        self.damaged = {name: reason for name in self.checkpoints.all() if (reason := self._damage(name)) is not None}
        record = self.made.overview.record
        self._database()
        if record is not None and self.made.overview.goes_on_with is not None:
            self.made.resume = resume_point(
                folder, record, lambda name: self.is_there(name) and not self.damaged.get(name)
            )
        self._checkpoints(record)
        if record is not None:
            self._pointers(record)
            self._unknown(record)
        if record is not None and record.facts:
            self._exports(record)
            self._files()
        if not self.is_running:
            self._rests()

    def is_there(self, name: str) -> bool:
        """True if a checkpoint is there."""
        return (self.folder / name).is_dir()

    def _found(self, what: str, problem: str, mend: str, *, is_damage: bool = True) -> None:
        self.made.findings.append(Finding(what, problem, mend, is_damage))

    def _damage(self, name: str) -> str | None:
        reason = damage(self.folder / name)
        return None if self.is_running and not (self.folder / name).is_dir() else reason  # removed meanwhile

    def _database(self) -> None:
        overview, start = self.made.overview, "start the run again under another name; nothing else holds its record"
        if overview.record is None:
            self._found("run.sqlite", overview.reason, start)
            return
        try:
            said = [str(row[0]) for row in read_rows(self.folder, "PRAGMA quick_check")]
            [[count]] = read_rows(self.folder, "SELECT count(*) FROM episodes") if overview.record.facts else [[0]]
        except sqlite3.Error as error:
            said, count = [f"{type(error).__name__}: {error}"], 0
        if said != ["ok"]:
            self._found("run.sqlite", "; ".join(said[:3]), start)
            return
        self.made.checked["database"] = f"whole, {count:,} episodes"
        if not overview.record.facts:
            mend = f"reinforge runs rm {overview.folder}; then start it again"
            self._found("run.sqlite", overview.reason, mend, is_damage=False)

    def _checkpoints(self, record: RunRecord | None) -> None:
        names = self.checkpoints.all()
        whole = [name for name in names if name not in self.damaged]
        size = size_text(sum(num_bytes(self.folder / name) for name in whole))
        self.made.checked["checkpoints"] = f"{len(whole)} of {len(names)} whole, {size}"
        needed = self._needed(record) if record is not None else {}
        for name, problem in self.damaged.items():
            self._found(name, problem, needed.get(name, f"{NOTHING_NEEDS_IT} to go on"))
        if (self.folder / "model").is_dir() and (reason := damage(self.folder / "model")) is not None:
            summary = self.made.overview.summary
            copy = summary.checkpoint if summary is not None else None
            self._found("model", reason, f"the same weights are in {copy}" if copy else "take a checkpoint instead")

    def _needed(self, record: RunRecord) -> dict[str, str]:
        """Returns what happens without those checkpoints that something needs."""
        found: dict[str, str] = {}
        best = choose_best(record.validations, self._gate_metric())
        if best is not None and best["checkpoint"]:
            lost = "the run is done, but its best weights are lost" if self.is_done else "no verdict can be given on it"
            found[best["checkpoint"]] = f"it is the best one; {lost}"
        base = record.validations[0]["checkpoint"] if record.validations else None
        if base:
            lost = "the run is done and keeps its figures" if self.is_done else "start a new run for a verdict"
            found[base] = f"it holds the weights before training; {lost}"
        newest = record.snapshots[0]["checkpoint"] if record.snapshots else None
        if newest and not self.is_done:
            point = self.made.resume
            goes_on = f"goes on {point}" if point is not None else "begins again: nothing else is durable"
            found[newest] = f"--resume does not use it and {goes_on}"
        return found

    def _gate_metric(self) -> str | None:
        try:
            return str(read_config(self.folder)["finetuning"]["gate"]["metric"] or "") or None
        except (KeyError, TypeError):
            return None

    def _pointers(self, record: RunRecord) -> None:
        """Finds entries of the journal whose checkpoint is not there, or another one than they say."""
        needed, told = self._needed(record), set[str]()
        for row in record.versions:
            name = row["checkpoint"]
            if name and name not in needed and not self.is_there(name) and not self.is_running:
                told.add(name)
                mend = f"{NOTHING_NEEDS_IT}: its removal was cut short"
                self._found(f"version {row['version']}", f"{name} is not there", mend, is_damage=False)
        for name, mend in needed.items():
            if not self.is_there(name) and name not in told:
                self._found(name, "the journal names it, and it is not there", mend)
        for row in record.snapshots:
            name, version = row["checkpoint"], row["version"]
            if name and version is not None and self.is_there(name) and name not in self.damaged:
                held = json.loads((self.folder / name / MANIFEST).read_text(encoding="utf-8")).get("version")
                if held != version:
                    problem = f"it holds version {held}, the snapshot of epoch {row['epoch']} says {version}"
                    self._found(name, problem, needed.get(name, NOTHING_NEEDS_IT))
        newest = record.snapshots[0]["epoch"] if record.snapshots else None
        where = "" if newest is None else f", the newest {after_epoch(newest)}"
        self.made.checked["snapshots"] = f"{len(record.snapshots)}{where}"

    def _unknown(self, record: RunRecord) -> None:
        known = {row["checkpoint"] for row in (*record.versions, *record.snapshots, *record.validations)}
        for name in self.checkpoints.all():
            if name in known or self.is_running or name in self.damaged:
                continue
            point = self.made.resume
            adopts = point is not None and point.checkpoint == name
            mend = f"--resume adopts it and goes on {point}" if adopts else NOTHING_NEEDS_IT
            self._found(name, "the journal does not know it", mend, is_damage=False)

    def _exports(self, record: RunRecord) -> None:
        rows = read_rows(self.folder, "SELECT epoch, count(*) FROM episodes WHERE phase = 'collect' GROUP BY epoch")
        counts, done = dict(rows), [row["epoch"] for row in record.snapshots if row["epoch"] >= 0]
        num_read = 0
        for epoch in sorted(done):
            if epoch not in counts or (self.is_running and epoch == max(done)):
                continue
            path = self.folder / "episodes" / f"epoch-{epoch:04d}.jsonl.zst"
            problem = _unreadable(path)
            num_read += problem is None
            if problem is None:
                continue
            due = not self.is_done and self.made.resume is not None and self.made.resume.epoch <= epoch
            by_hand = f"RunStore.open(Path({str(self.folder)!r})).export_epoch({epoch})"
            how = "--resume makes it again" if due else f"in Python, {by_hand} makes it again"
            mend = f"nothing is lost, the journal holds its {counts[epoch]:,} episodes; {how}"
            self._found(f"episodes/{path.name}", problem, mend, is_damage=path.exists() or not due)
        self.made.checked["exports"] = f"{num_read} readable"

    def _files(self) -> None:
        overview = self.made.overview
        if overview.record is not None and overview.record.facts and not read_config(self.folder):
            mend = "reinforge finetune FILE --dry_run with your file writes it anew beside the runs; copy it here"
            self._found("config.yml", "it is missing or cannot be read", mend)
        if overview.status != RUNNING and overview.record is not None and self._says_it_ended(overview.record):
            try:
                load_summary(self.folder)
            except ReinforgeError as error:
                mend = "the figures of its validations are in the journal: reinforge runs show"
                self._found("summary.json", str(error), mend if self.is_done else "--resume writes it when it ends")

    def _says_it_ended(self, record: RunRecord) -> bool:
        return record.facts.get("status") not in (None, RUNNING)

    def _rests(self) -> None:
        for path in leftovers(self.folder):
            what = "it was being removed" if path.name.startswith(TRASH) else "it was being written"
            swept = path.is_dir() and not self.is_done and path.parent.name != "episodes"
            mend = "--resume removes it" if swept else "nothing reads it; it may be removed by hand"
            name = str(path.relative_to(self.folder))
            self._found(name, f"{what} when its process ended", mend, is_damage=False)


def _unreadable(path: Path) -> str | None:
    """Returns what is wrong with an export, or None: every line of it can be read."""
    try:
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            rest, expected, found = b"", zstandard.frame_content_size(file.read(64)), 0
            file.seek(0)
            while part := reader.read(2**20):
                found += len(part)
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    json.loads(line)
        return "it is cut off" if rest or (expected >= 0 and found != expected) else None
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError, zstandard.ZstdError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"
