"""The checkpoints of a run: committed whole or invisible, and no more of them kept than needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from reinforge.crash import crash_point
from reinforge.errors import StorageError
from reinforge.files import (
    MANIFEST,
    commit_folder,
    damage,
    remove_folder,
    replace_file,
    staging_folder,
    to_json,
    write_folder,
    writing,
)
from reinforge.interfaces import TrainerAdapter

STATE = Path("training") / "run.json"
"""What the run held when the checkpoint was written: a checkpoint that the journal does not know yet is adopted."""


class Checkpoints:
    """The folder `checkpoints` of one run.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path):
        self.run, self.folder = run, run / "checkpoints"

    def name(self, version: int) -> str:
        """Returns the name of a version's checkpoint, relative to the run folder."""
        return f"checkpoints/step-{version:06d}"

    def has(self, version: int) -> bool:
        """True if the checkpoint of a version is there."""
        return (self.run / self.name(version)).is_dir()

    def all(self) -> list[str]:
        """Returns the checkpoints that are there, the oldest first."""
        return sorted(f"checkpoints/{path.name}" for path in self.folder.glob("step-*"))

    async def keep(self, adapter: TrainerAdapter, version: int, state: dict[str, Any] | None = None) -> str | None:
        """Writes the weights as they are, under the name of `version`; returns it.

        Args:
            adapter: Writes them.
            version: Their version.
            state: What else is needed to go on from there.

        Returns:
            Its name; None where the backend keeps its weights to itself.

        Raises:
            StorageError: It cannot be written; what stood there before still does.
        """
        target, staged = self.run / self.name(version), staging_folder(self.folder)
        try:
            if not await adapter.save(staged, version):
                return None
            text = to_json(state or {}) + "\n"
            with writing(target, len(text)):
                (staged / STATE).parent.mkdir(exist_ok=True)
            replace_file(staged / STATE, text)
            commit_folder(staged, target, version=version)
        except BaseException as error:
            shutil.rmtree(staged, ignore_errors=True)
            if isinstance(error, StorageError):
                raise StorageError(str(error).replace(str(staged), str(target))) from error
            raise
        crash_point("ckpt.after_rename")
        return self.name(version)

    def checked(self, name: str) -> Path:
        """Returns the folder of a checkpoint, every byte of which was compared with its manifest.

        Raises:
            StorageError: It is damaged.
        """
        reason = self.damage(name)
        if reason is not None:
            raise StorageError(f"{self.run / name} is damaged and not used: {reason}")
        return self.run / name

    def damage(self, name: str) -> str | None:
        """Returns what is wrong with a checkpoint, or None."""
        return damage(self.run / name)

    def state(self, name: str) -> dict[str, Any] | None:
        """Returns what `keep` was given beside the weights; None where that cannot be read."""
        try:
            found = json.loads((self.run / name / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found else None

    def drop_all_but(self, kept: Collection[str]) -> list[str]:
        """Removes every other checkpoint; returns their names."""
        dropped = [name for name in self.all() if name not in kept]
        for name in dropped:
            remove_folder(self.run / name)
        return dropped


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copies the model's files of a checkpoint, not the training's, to `target`; each adapter's, where it has several.

    Raises:
        StorageError: They cannot be copied.
    """
    ignored = shutil.ignore_patterns(STATE.parent.name, MANIFEST)
    with writing(target):
        write_folder(target, lambda staged: shutil.copytree(checkpoint, staged, ignore=ignored))
