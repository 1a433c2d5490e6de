"""Checkpoints of a training: whole or not there.

run_dir/
  log.jsonl                  one line a batch, one an experience, one an evaluation
  checkpoints/step-000012/   weights and optimizer as the system writes them, trainer.json, manifest.json
  best/                      the same, of the best evaluation
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import StorageError
from reinforge.files import commit_folder, damage, remove_folder, staging_folder, writing
from reinforge.redteam.core.system import System

STATE = "trainer.json"


@dataclass(slots=True)
class TrainerState:
    """Where a training stands.

    Attributes:
        experience: Experiences done.
        global_step: Batches done.
        num_steps: Optimizer steps made.
        num_empty: Experiences in a row that moved nothing.
        best: Score of the best evaluation; None before the first.
        since_best: Evaluations since then.
    """

    experience: int = 0
    global_step: int = 0
    num_steps: int = 0
    num_empty: int = 0
    best: float | None = None
    since_best: int = 0


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        run_dir: The run folder.
        keep: How many of the newest stay.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.run_dir, self.keep = run_dir, keep

    @property
    def _folder(self) -> Path:
        return self.run_dir / "checkpoints"

    def newest(self) -> Path | None:
        """Returns the newest whole checkpoint, or None."""
        found = sorted(self._folder.glob("step-*"), reverse=True)
        return next((folder for folder in found if damage(folder) is None), None)

    def save(self, system: System[Any, Any], mover: Any, state: TrainerState, *, best: bool = False) -> Path:
        """Writes one, and takes away those that are too old.

        Raises:
            StorageError: It cannot be written.
        """
        target = self.run_dir / "best" if best else self._folder / f"step-{state.experience:06}"
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = staging_folder(target.parent)
            try:
                staged.mkdir()
                system.compute(lambda: system.write(staged, mover))
                (staged / STATE).write_text(json.dumps(asdict(state), indent=1) + "\n")
                commit_folder(staged, target)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        if not best:
            for old in sorted(self._folder.glob("step-*"))[: -self.keep]:
                remove_folder(old)
        return target

    def load(self, folder: Path, system: System[Any, Any], mover: Any) -> TrainerState:
        """Puts weights and optimizer back and returns where the training stood.

        Raises:
            StorageError: The folder is damaged.
            EngineError: It holds another model.
        """
        try:
            state = TrainerState(**json.loads((folder / STATE).read_text()))
        except (OSError, ValueError, TypeError) as cause:
            raise StorageError(f"read {folder / STATE}: {cause}") from cause
        system.read(folder, mover, state.num_steps)
        return state
