"""Options of one call that are not part of the configuration."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, Problem
from reinforge.runs.progress import RunProgress


@dataclass
class RunOptions:
    """Options of one call that are not part of the configuration.

    Attributes:
        run_name: Name of the run folder; None: the date and a random suffix.
        progress: The progress display.
        smoke: Run everything once, as small as possible, in a folder named `...-smoke`.
        resume: Folder of the run to resume; None: a new run.
        allow_config_change: Resume although the configuration has changed.
        folder: The run folder; set once it exists.
    """

    run_name: str | None = None
    progress: RunProgress | None = None
    smoke: bool = False
    resume: Path | None = None
    allow_config_change: bool = False
    folder: Path | None = None

    def choose_folder(self, config: FinetuneConfig, suffix: str = "") -> Path:
        """Returns the folder of a new run."""
        if self.run_name is not None and (Path(self.run_name).name != self.run_name or self.run_name == ".."):
            message = f'"{self.run_name}" cannot be the name of a folder in {config.output_dir}'
            raise ConfigError(Problem("--run_name", message, "use letters, digits, - and _"))
        name = self.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        return Path(config.output_dir).expanduser() / f"{name}{suffix}"
