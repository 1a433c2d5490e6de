"""Writes trained testers of any system, the caller's own included."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.files import storage_boundary, write_folder
from reinforge.redteam.core.system import WEIGHTS_FILE, System

if TYPE_CHECKING:
    from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer

logger = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer", "tester_tokenizer")
"""Attributes of a system under which its tester's tokenizer is looked for."""


def check_tester_can_be_saved(system: System[Any, Any]) -> None:
    """Warns, before training, if a tester will be written as bare parameters."""
    if not hasattr(system, "save") and find_module(system) is None:
        logger.warning(
            "%s has neither save(folder) nor a tester with save_pretrained: testers are written as %s, which "
            "system.read loads; add one of the two to write them in another format",
            type(system).__name__,
            WEIGHTS_FILE,
        )


def find_module(system: System[Any, Any]) -> Any:
    return _find_saveable(system, ("tester", "auditor"))


def _find_saveable(system: System[Any, Any], names: Sequence[str]) -> Any:
    named = (getattr(system, name, None) for name in names)
    return next((found for found in named if hasattr(found, "save_pretrained")), None)


def save_tester(system: System[Any, Any], folder: Path, optimizer: ScheduledOptimizer) -> None:
    """Writes a system's tester into a folder, which is complete or not there.

    The system's own `save(folder)` writes it if there is one. Otherwise `system.tester.save_pretrained` does, with the
    tokenizer; and a system without these is written as `System.write` writes it.

    Raises:
        StorageError: The folder cannot be written.
    """
    with storage_boundary(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(system, "save"):
        system.save(folder)
        return

    def fill(staged: Path) -> None:
        with storage_boundary(folder):
            staged.mkdir()
            if (module := find_module(system)) is None:
                system.write(staged, optimizer)
                return
            module.save_pretrained(staged)
            if (tokenizer := _find_saveable(system, TOKENIZERS)) is not None:
                tokenizer.save_pretrained(staged)

    system.compute(lambda: write_folder(folder, fill))
