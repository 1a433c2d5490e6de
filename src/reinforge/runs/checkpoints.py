"""The checkpoints of a run. Each is committed whole or not visible; those that are no longer needed are removed."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.crash import crash_point
from reinforge.errors import StorageError
from reinforge.files import (
    MANIFEST,
    commit_folder,
    find_damage,
    find_json,
    make_staging_path,
    remove_folder,
    replace_file,
    storage_boundary,
    to_json,
    write_folder,
)
from reinforge.interfaces import TrainerAdapter
from reinforge.port_bases import SavesWeights

ADAPTER = "adapter_config.json"
STATE = Path("training") / "run.json"
"""The run's state when the checkpoint was written; with it a checkpoint that the journal does not list is adopted."""


def is_model_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER, HOSTED_MODEL))


def list_adapters(folder: Path) -> tuple[str, ...]:
    """Returns the names of the models in the subfolders of a folder, as runs with several adapters write them."""
    return (
        ()
        if is_model_folder(folder)
        else tuple(sorted(each.name for each in folder.glob("*/") if is_model_folder(each)))
    )


async def restore_weights(adapter: TrainerAdapter, folder: Path, version: int) -> bool:
    """Loads the weights in a folder and serves them as `version`; False: the backend cannot."""
    return isinstance(adapter, SavesWeights) and await adapter.restore(folder, version)


class Checkpoints:
    """The folder `checkpoints` of one run."""

    def __init__(self, run: Path):
        self.run, self.folder = run, run / "checkpoints"

    def name(self, version: int) -> str:
        return f"checkpoints/step-{version:06d}"

    def has(self, version: int) -> bool:
        return (self.run / self.name(version)).is_dir()

    def names(self) -> list[str]:
        return sorted(f"checkpoints/{path.name}" for path in self.folder.glob("step-*"))

    async def write(self, adapter: TrainerAdapter, version: int, state: dict[str, Any] | None = None) -> str | None:
        """Writes the current weights and the run's state as the checkpoint of `version`, whole or not at all.

        Returns:
            The checkpoint's name; None: the backend does not export its weights.
        """
        target, staged = self.run / self.name(version), make_staging_path(self.folder)
        try:
            if not isinstance(adapter, SavesWeights) or not await adapter.save(staged, version):
                return None
            text = to_json(state or {}) + "\n"
            with storage_boundary(target, len(text)):
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

    def verify(self, name: str) -> Path:
        """Returns the folder of a checkpoint after comparing every byte with its manifest; raises `StorageError`."""
        reason = self.find_damage(name)
        if reason is not None:
            raise StorageError(f"{self.run / name} is damaged: {reason}")
        return self.run / name

    def find_damage(self, name: str) -> str | None:
        return find_damage(self.run / name)

    def read_state(self, name: str) -> dict[str, Any] | None:
        """Returns the state that was written with a checkpoint; None: it cannot be read."""
        found = find_json(self.run / name / STATE)
        return found if isinstance(found, dict) and found else None

    def remove_except(self, kept: Collection[str]) -> list[str]:
        dropped = [name for name in self.names() if name not in kept]
        for name in dropped:
            remove_folder(self.run / name)
        return dropped


def copy_model(checkpoint: Path, target: Path) -> None:
    """Copies the model of a checkpoint, with all its adapters but without the training state, to `target`."""
    ignored = shutil.ignore_patterns(STATE.parent.name, MANIFEST)
    with storage_boundary(target):
        write_folder(target, lambda staged: shutil.copytree(checkpoint, staged, ignore=ignored))
