"""Where the embedded engine's checkpoints are: one folder, or one for each of several adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.files import write_folder

if TYPE_CHECKING:
    from reinforge.engine import Engine


def save_job(engine: Engine, folder: Path) -> None:
    """Writes a job's weights, completely or not at all."""
    version = engine.policy.version + 1
    write_folder(folder, lambda staged: write_checkpoint(engine, staged, version), version=version)


def write_checkpoint(engine: Engine, folder: Path, version: int) -> None:
    for name in engine.policies:
        engine.write(get_adapter_folder(folder, engine, name), version, name)


def find_checkpoint(folder: Path, version: int) -> Path:
    stem, _, digits = folder.name.rpartition("-")
    return folder.with_name(f"{stem}-{version:0{len(digits)}d}")


def get_adapter_folder(folder: Path, engine: Engine, name: str) -> Path:
    return folder / name if len(engine.policies) > 1 else folder
