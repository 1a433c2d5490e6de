"""Options of one call that are not part of the configuration."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reinforge.config.schema import FinetuneConfig
from reinforge.runs.progress import RunProgress
from reinforge.runs.run_folder import check_run_name

if TYPE_CHECKING:
    from reinforge.trainer.context import RunContext


@dataclass
class LiveRun:
    """What the guard knows about a run."""

    blocked_s: float = 120.0  # seconds for which an agent may block the event loop
    is_saving: bool = False
    folder: Path | None = None  # of the run; None: no agent has been called yet
    record_end: Callable[[str], str] = lambda reason: reason
    """Records in the run folder that the process exits now, and returns the message for the user."""


@dataclass
class RunOptions:
    """Options of one call that are not part of the configuration."""

    run_name: str | None = None  # name of the run folder; None: the date and a random suffix
    progress: RunProgress | None = None
    smoke: bool = False  # run everything once, as small as possible, in a folder named `...-smoke`
    resume: Path | None = None
    allow_config_change: bool = False
    judge_only: bool = False  # resume a stopped run for its verdict alone, after the epochs that it has trained
    find_pause: Callable[[RunContext, int], str | None] | None = None
    """Asked between two epochs, with the number of those that are done; a reason pauses the run, without a verdict."""
    baseline_from: Path | None = None
    """Folder of a run whose measurement of the same untouched agent on `select` counts for this one, too."""
    overwrite: bool = False
    """Replace a run of the same name that no process works on, once the new one is known to be valid."""
    folder: Path | None = None
    live: LiveRun = field(default_factory=LiveRun)

    def choose_folder(self, config: FinetuneConfig, suffix: str = "") -> Path:
        if self.run_name is not None:
            check_run_name(self.run_name)
        name = self.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        return Path(config.output_dir).expanduser() / f"{name}{suffix}"
