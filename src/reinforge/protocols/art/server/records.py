"""What is on disk of the models that clients train: their names, their jobs, and how those ended.

    DATA/art/MODEL/model.json                   names and base model
    DATA/art/MODEL/checkpoints/step-000003/     the weights of a step; the manifest names the job that made it
    DATA/art/MODEL/jobs/JOB/request.json        what was asked for, before it is answered
    DATA/art/MODEL/jobs/JOB/result.json         how it ended

A job without a result runs again after a restart, unless a checkpoint shows that it has ended.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.files import find_damage, find_json, make_private_folder, remove_folder, write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RETRY_S = 600.0  # how long after a job a client may send its request again
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class ModelRecord:
    id: str
    entity: str
    project: str
    name: str
    base_model: str
    created_s: float

    @property
    def artifact(self) -> str:
        return f"wandb-artifact:///{self.entity}/{self.project}/{self.name}"

    def describe(self) -> dict[str, Any]:
        return {**asdict(self), "run_id": None}


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended."""

    step: int | None  # the step that it made; None: it failed
    error: str | None
    metrics: dict[str, float]
    num_sequences: int


class ModelFolder:
    def __init__(self, path: Path):
        self.path = path
        self._damaged: set[tuple[Path, int]] = set()

    @classmethod
    def create(cls, parent: Path, record: ModelRecord) -> ModelFolder:
        folder = cls(parent / record.id)
        for path in (folder.path, folder.path / "checkpoints", folder.path / "jobs"):
            make_private_folder(path)
        write_json(folder.path / "model.json", asdict(record))
        return folder

    def read(self) -> ModelRecord | None:
        """Returns the model; None: its creation was interrupted."""
        found = _read_json(self.path / "model.json")
        return None if found is None else ModelRecord(**found)

    def remove(self) -> None:
        remove_folder(self.path)

    def get_checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}"

    def list_steps(self) -> list[int]:
        """Returns the steps that are saved, in rising order; without those that `find_newest` has found damaged."""
        saved = [path for path in (self.path / "checkpoints").iterdir() if (path / MANIFEST).is_file()]
        intact = [path for path in saved if (path, path.stat().st_mtime_ns) not in self._damaged]
        return sorted(int(match[1]) for path in intact if (match := _STEP.fullmatch(path.name)))

    def find_newest(self) -> int | None:
        """Returns the newest step whose files are intact; None: there is none. It reads all of them."""
        for step in reversed(self.list_steps()):
            path = self.get_checkpoint(step)
            if (damage := find_damage(path)) is None:
                return step
            logger.warning("%s is not used: %s", path, damage)
            self._damaged.add((path, path.stat().st_mtime_ns))
        return None

    def find_step_of(self, job: str) -> int | None:
        """Returns the step that a job made; None: it made none."""
        for step in reversed(self.list_steps()):
            if (_read_json(self.get_checkpoint(step) / MANIFEST) or {}).get("job") == job:
                return step
        return None

    def remove_step(self, step: int) -> None:
        remove_folder(self.get_checkpoint(step))

    def record_job(self, id_: str, request: dict[str, Any]) -> None:
        """Writes what a job was asked for; once this returns, the job survives a crash."""
        make_private_folder(self.path / "jobs" / id_)
        write_json(self.path / "jobs" / id_ / "request.json", request)

    def find_repeated(self, request: dict[str, Any]) -> str | None:
        """Returns the newest job of the last minutes that was the same; None: there is none. It reads them all."""
        oldest_s = time.time() - RETRY_S
        for id_ in reversed(self.list_jobs()):
            if (self.path / "jobs" / id_ / "request.json").stat().st_mtime < oldest_s:
                return None
            if self.read_request(id_) == request:
                return id_
        return None

    def record_result(self, id_: str, result: JobResult) -> None:
        write_json(self.path / "jobs" / id_ / "result.json", asdict(result))

    def read_request(self, id_: str) -> dict[str, Any] | None:
        """Returns what a job was asked for; None: its creation was interrupted."""
        return _read_json(self.path / "jobs" / id_ / "request.json")

    def read_result(self, id_: str) -> JobResult | None:
        """Returns how a job ended; None: it has not."""
        found = _read_json(self.path / "jobs" / id_ / "result.json")
        return None if found is None else JobResult(**found)

    def list_jobs(self) -> list[str]:
        requests = [path / "request.json" for path in (self.path / "jobs").iterdir()]
        known = [(path.stat().st_mtime_ns, path.parent.name) for path in requests if path.is_file()]
        return [id_ for _, id_ in sorted(known)]


def _read_json(path: Path) -> dict[str, Any] | None:
    value = find_json(path)
    return value if isinstance(value, dict) else None
