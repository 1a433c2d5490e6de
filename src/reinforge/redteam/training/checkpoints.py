"""Checkpoints of a training run; each one is complete or does not exist.

run_dir/
  log.jsonl                  one line per batch, experience and evaluation
  checkpoints/step-000012/   weights and optimizer as the system writes them, trainer.json, manifest.json
  best/                      the same, from the best evaluation
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError
from reinforge.files import commit_folder, find_damage, make_staging_path, remove_folder, storage_boundary
from reinforge.redteam.core.system import System

STATE_FILE = "trainer.json"


@dataclass(slots=True)
class TrainerState:
    """The progress of a training run.

    Attributes:
        experience: Experiences completed.
        global_step: Batches processed.
        num_steps: Optimizer steps made.
        num_empty: Consecutive experiences without a usable batch.
        best: Score of the best evaluation; None before the first.
        since_best: Evaluations since the best one.
    """

    experience: int = 0
    global_step: int = 0
    num_steps: int = 0
    num_empty: int = 0
    best: float | None = None
    since_best: int = 0


class TrainingCheckpoints:
    """The checkpoints of one run folder.

    Args:
        run_dir: The run folder.
        keep: Number of newest checkpoints to keep.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.run_dir, self.keep = run_dir, keep

    @property
    def _folder(self) -> Path:
        return self.run_dir / "checkpoints"

    def newest(self) -> Path | None:
        found = sorted(self._folder.glob("step-*"), reverse=True)
        return next((folder for folder in found if find_damage(folder) is None), None)

    def save(self, system: System[Any, Any], optimizer: Any, state: TrainerState, *, best: bool = False) -> Path:
        """Writes a checkpoint and deletes those beyond `keep`.

        Args:
            state: The progress of the run.
            best: Write to `best/` instead, and delete nothing.

        Raises:
            StorageError: The checkpoint cannot be written.
        """
        target = self.run_dir / "best" if best else self._folder / f"step-{state.experience:06}"
        with storage_boundary(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = make_staging_path(target.parent)
            try:
                staged.mkdir()
                system.compute(lambda: system.write(staged, optimizer))
                (staged / STATE_FILE).write_text(json.dumps(asdict(state), indent=1) + "\n")
                commit_folder(staged, target)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        if not best:
            for old in sorted(self._folder.glob("step-*"))[: -self.keep]:
                remove_folder(old)
        return target

    def load(self, folder: Path, system: System[Any, Any], optimizer: Any) -> TrainerState:
        """Loads weights and optimizer state, and returns the progress of the run.

        Raises:
            StorageError: The folder is damaged.
            EngineError: The folder holds another model.
        """
        try:
            state = TrainerState(**json.loads((folder / STATE_FILE).read_text()))
        except (OSError, ValueError, TypeError) as cause:
            raise StorageError(f"cannot read {folder / STATE_FILE}: {cause}") from cause
        system.read(folder, optimizer, state.num_steps)
        return state
