"""Checks that a run folder holds exactly what its journal says; changes nothing.

database      every row, with its checksum                 checkpoints   each file against their manifest's SHA-256
snapshots     the checkpoints that a run can resume from   exports       one per epoch, readable to the last line
files         each against the SHA-256 in the run's own manifest (unless a process is writing them)
leftovers     what a killed process was writing or removing, and checkpoints that are not in the journal (yet)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from reinforge.bounded import load_json
from reinforge.errors import ReinforgeError
from reinforge.files import MANIFEST, TRASH, find_damage, list_damage, read_json_file, read_manifest
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.reader import JOURNAL, JournalReader
from reinforge.runs.journal.repair import JournalCheck, check_journal
from reinforge.runs.rows import choose_best_validation
from reinforge.runs.run_folder import (
    COMPLETED,
    RUNNING,
    ResumePoint,
    RunOverview,
    RunRecord,
    describe_position,
    find_leftovers,
    find_resume_point,
    format_size,
    measure_size,
    read_config,
    read_overview,
)
from reinforge.runs.summary import load_summary

NOT_NEEDED = "not needed"
CONFIG_FIX = "run `reinforge finetune FILE --dry_run` with your file, and copy the config.yml that it writes here"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem in a run folder; `is_damage` is False for a harmless leftover."""

    what: str
    problem: str
    fix: str
    is_damage: bool = True


@dataclass
class Verification:
    """The result of checking a run folder."""

    overview: RunOverview
    checked: dict[str, str] = field(default_factory=dict)  # what was checked -> what was found intact
    findings: list[Finding] = field(default_factory=list)
    resume: ResumePoint | None = None  # where `--resume` resumes; None: from the beginning, or not at all

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged; there may be harmless leftovers."""
        return not any(finding.is_damage for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "sound": self.is_sound,
            "checked": self.checked,
            "findings": [asdict(finding) for finding in self.findings],
            "resume_point": asdict(self.resume) if self.resume is not None else None,
            "run": self.overview.as_dict(),
        }


def verify_run(folder: Path) -> Verification:
    return _Verifier(folder).run()


class _Verifier:
    """One check of a run folder; skips what a process that is using the run may change at any moment."""

    def __init__(self, folder: Path):
        self.folder, self.checkpoints, self.reader = folder, Checkpoints(folder), JournalReader(folder)
        self.result = Verification(read_overview(folder))
        self.record = self.result.overview.record
        self.is_running = self.result.overview.owner is not None
        self.is_done = self.result.overview.status == COMPLETED
        self.damaged = {
            name: reason for name in self.checkpoints.names() if (reason := self._find_damage(name)) is not None
        }

    def run(self) -> Verification:
        self._check_database()
        if self.record is not None and self.result.overview.resume_command is not None:
            self.result.resume = find_resume_point(self.folder, self.record, self._is_intact)
        self._check_checkpoints()
        if self.record is not None:
            self._check_references(self.record)
            self._check_unknown_checkpoints(self.record)
        if self.record is not None and self.record.facts:
            self._check_exports(self.record)
            self._check_files(self.record)
        if not self.is_running:
            self._check_manifest()
            self._check_leftovers()
        return self.result

    def _exists(self, name: str) -> bool:
        try:
            return (self.folder / name).is_dir()
        except OSError:  # a damaged journal may name what no folder can be called
            return False

    def _is_intact(self, name: str) -> bool:
        return self._exists(name) and name not in self.damaged

    def _report(self, what: str, problem: str, fix: str, *, is_damage: bool = True) -> None:
        self.result.findings.append(Finding(what, problem, fix, is_damage))

    def _find_damage(self, name: str) -> str | None:
        reason = find_damage(self.folder / name)
        return None if self.is_running and not self._exists(name) else reason  # removed in the meantime

    def _check_database(self) -> None:
        overview = self.result.overview
        if not self.is_running:
            found = check_journal(self.folder)
            if found.problems:
                more = f"; and {len(found.problems) - 3} more" if len(found.problems) > 3 else ""
                self._report(JOURNAL, "; ".join(found.problems[:3]) + more, self._describe_rescue(found))
                return
            if self.record is not None:
                text = f"intact, {found.num_episodes:,} episodes, {found.num_rows:,} rows read"
                self.result.checked["database"] = text
        if self.record is None:
            self._report(JOURNAL, overview.reason, "start a new run: the journal is the only record of this one")
        elif not self.record.facts:
            fix = f"remove it with `reinforge runs rm {overview.folder}`, then start it again"
            self._report(JOURNAL, overview.reason, fix, is_damage=False)

    def _describe_rescue(self, found: JournalCheck) -> str:
        intact = [name for name in self.checkpoints.names() if name not in self.damaged]
        metrics = "training_metrics.jsonl, " if (self.folder / "training_metrics.jsonl").is_file() else ""
        kept = (
            f"{found.num_rows:,} intact rows with {found.num_episodes:,} episodes, {metrics}{len(intact)} checkpoints"
        )
        command = f"reinforge finetune --resume {self.folder}"
        how = "rebuilds the journal from them and resumes from the newest checkpoint before which nothing is missing"
        return f"recoverable: {kept}; `{command}` {how}"

    def _check_checkpoints(self) -> None:
        names = self.checkpoints.names()
        intact = [name for name in names if name not in self.damaged]
        size = format_size(sum(measure_size(self.folder / name) for name in intact))
        self.result.checked["checkpoints"] = f"{len(intact)} of {len(names)} intact, {size}"
        consequences = self._find_consequences()
        for name, problem in self.damaged.items():
            self._report(name, problem, consequences.get(name, f"{NOT_NEEDED} to resume"))
        if (self.folder / "model").is_dir() and (reason := find_damage(self.folder / "model")) is not None:
            summary = self.result.overview.summary
            copy = summary.checkpoint if summary is not None else None
            self._report("model", reason, f"the same weights are in {copy}" if copy else "use a checkpoint instead")

    def _find_consequences(self) -> dict[str, str]:
        """Returns, for each checkpoint that is needed, what happens without it."""
        found: dict[str, str] = {}
        if self.record is None:
            return found
        best = choose_best_validation(self.record.validations, self._gate_metric())
        if best is not None and best.checkpoint:
            loss = "the run is complete, but its best weights are lost" if self.is_done else "no verdict is possible"
            found[best.checkpoint] = f"it is the best checkpoint: {loss}"
        base = self.record.validations[0].checkpoint if self.record.validations else None
        if base:
            loss = "the run is complete and keeps its results" if self.is_done else "start a new run to get a verdict"
            found[base] = f"it holds the weights before training: {loss}"
        newest = self.record.snapshots[0].checkpoint if self.record.snapshots else None
        if newest and not self.is_done:
            point = self.result.resume
            restart = "restarts from the beginning: no other checkpoint is usable"
            found[newest] = f"--resume skips it and {restart if point is None else f'resumes {point}'}"
        return found

    def _gate_metric(self) -> str | None:
        try:
            return str(read_config(self.folder)["finetuning"]["gate"]["metric"] or "") or None
        except (KeyError, TypeError):
            return None

    def _check_references(self, record: RunRecord) -> None:
        """Finds entries of the journal whose checkpoint is missing or holds another version."""
        consequences, reported = self._find_consequences(), set[str]()
        for version in record.versions:
            name = version.checkpoint
            if name and name not in consequences and not self._exists(name) and not self.is_running:
                reported.add(name)
                fix = f"{NOT_NEEDED}: its removal was interrupted"
                self._report(f"version {version.version}", f"{name} is missing", fix, is_damage=False)
        for name, fix in consequences.items():
            if not self._exists(name) and name not in reported:
                self._report(name, "it is missing, but the journal lists it", fix)
        for row in record.snapshots:
            name = row.checkpoint
            if name and row.version is not None and self._is_intact(name):
                held = read_json_file(self.folder / name / MANIFEST).get("version")
                if held != row.version:
                    problem = f"it holds version {held}, but the snapshot of epoch {row.epoch} says {row.version}"
                    self._report(name, problem, consequences.get(name, NOT_NEEDED))
        newest = record.snapshots[0].epoch if record.snapshots else None
        where = "" if newest is None else f", the newest {describe_position(newest)}"
        self.result.checked["snapshots"] = f"{len(record.snapshots)}{where}"

    def _check_unknown_checkpoints(self, record: RunRecord) -> None:
        known = {row.checkpoint for row in record.versions}
        known |= {row.checkpoint for row in record.snapshots} | {row.checkpoint for row in record.validations}
        for name in self.checkpoints.names():
            if name in known or self.is_running or name in self.damaged:
                continue
            point = self.result.resume
            adopts = point is not None and point.checkpoint == name
            fix = f"--resume adopts it and resumes {point}" if adopts else NOT_NEEDED
            self._report(name, "it is not in the journal", fix, is_damage=False)

    def _check_exports(self, record: RunRecord) -> None:
        counts, done = self.reader.count_collected(), [row.epoch for row in record.snapshots if row.epoch >= 0]
        num_readable = 0
        for epoch in sorted(done):
            if epoch not in counts or (self.is_running and epoch == max(done)):
                continue
            path = self.folder / "episodes" / f"epoch-{epoch:04d}.jsonl.zst"
            problem = _find_export_problem(path)
            num_readable += problem is None
            if problem is None:
                continue
            is_due = not self.is_done and self.result.resume is not None and self.result.resume.epoch <= epoch
            by_hand = f"RunJournal.open(Path({str(self.folder)!r})).export_epoch({epoch})"
            how = "--resume exports them again" if is_due else f"in Python, {by_hand} exports them again"
            fix = f"nothing is lost: the journal holds the {counts[epoch]:,} episodes; {how}"
            self._report(f"episodes/{path.name}", problem, fix, is_damage=path.exists() or not is_due)
        self.result.checked["exports"] = f"{num_readable} readable"

    def _check_files(self, record: RunRecord) -> None:
        if not read_config(self.folder):
            self._report("config.yml", "it is missing or cannot be read", CONFIG_FIX)
        has_ended = record.facts.get("status") not in (None, RUNNING)
        if self.result.overview.status != RUNNING and has_ended:
            try:
                load_summary(self.folder)
            except ReinforgeError as error:
                fix = "`reinforge runs show` prints the validation scores from the journal"
                self._report("summary.json", str(error), fix if self.is_done else "--resume writes it when it ends")

    def _check_manifest(self) -> None:
        """Compares every listed file; what other checks have reported is not repeated."""
        if self.record is not None and not self.record.facts:  # it was stopped before it had a manifest
            return
        fixes = {
            JOURNAL: "every row in it is intact: nothing is lost",
            MANIFEST: "other changes cannot be found without it; the run writes it again when it is resumed",
            "config.yml": CONFIG_FIX,
            "report.html": f"`reinforge report {self.folder}` regenerates it",
        }
        reported, damage = {finding.what for finding in self.result.findings}, list(list_damage(self.folder))
        for name, problem in damage:
            if name not in reported:
                fix = fixes.get(name, f"{NOT_NEEDED} to resume; the journal holds the results")
                self._report(name, problem.replace(f"{name} ", "it ", 1), fix)
        if MANIFEST not in dict(damage):
            total = len(read_manifest(self.folder))
            self.result.checked["files"] = f"{total - len(damage)} of {total} listed files intact"

    def _check_leftovers(self) -> None:
        for path in find_leftovers(self.folder):
            action = "removing" if path.name.startswith(TRASH) else "writing"
            is_swept = path.is_dir() and not self.is_done and path.parent.name != "episodes"
            fix = "--resume removes it" if is_swept else "it is never read; you can delete it"
            name = str(path.relative_to(self.folder))
            self._report(name, f"left behind by a process that was killed while {action} it", fix, is_damage=False)


def _find_export_problem(path: Path) -> str | None:
    try:
        if path.exists() and (path.is_symlink() or not path.is_file()):
            return "it is not a regular file"
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
            rest, expected, found = b"", zstandard.frame_content_size(file.read(64)), 0
            file.seek(0)
            while part := reader.read(2**20):
                found += len(part)
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    load_json(line)
        return "it is truncated" if rest or (expected >= 0 and found != expected) else None
    except FileNotFoundError:
        return "it is missing"
    except (OSError, ValueError, zstandard.ZstdError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"
