"""`run.log`: what the user saw of a run, and every message of the package, each with its time.

It is appended to by every process that works on the run. Beyond 16 MiB the older half is in `run.log.1`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

from reinforge.files import open_private
from reinforge.runs.progress import PlainProgress, RunProgress
from reinforge.runs.rows import EpochMetrics, ValidationRow

LOG = "run.log"
MAX_BYTES = 16 << 20
PROGRESS_S = 60.0
"""Seconds between two lines about the episodes of a stage."""

logger = logging.getLogger(__name__)


class RunLogHandler(RotatingFileHandler):
    """Writes messages to the log of a run; what cannot be written is left out, since it must not stop the run.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path):
        super().__init__(folder / LOG, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves the message out: a full disk ends the run where its work is written, with the path."""


class LoggedProgress:
    """Passes the events of a run to the display and writes its permanent lines to the log.

    Args:
        display: What the user sees.
    """

    def __init__(self, display: RunProgress):
        self.display = display
        self._log = PlainProgress(cast(TextIO, _LogStream()), every_s=PROGRESS_S)

    def start(self, run_id: str, folder: Path, num_epochs: int, settings: Sequence[tuple[str, str]]) -> None:
        self.display.start(run_id, folder, num_epochs, settings)
        self._log.start(run_id, folder, num_epochs, settings)

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        self.display.stage(epoch, stage, total)
        self._log.stage(epoch, stage, total)

    def episode(self, outcome: str, reward: float | None, num_tokens: int) -> None:
        self.display.episode(outcome, reward, num_tokens)
        self._log.episode(outcome, reward, num_tokens)

    def epoch_done(self, metrics: EpochMetrics) -> None:
        self.display.epoch_done(metrics)
        self._log.epoch_done(metrics)

    def validation(self, row: ValidationRow) -> None:
        self.display.validation(row)
        self._log.validation(row)

    def note(self, text: str) -> None:
        self.display.note(text)
        self._log.note(text)

    def close(self) -> None:
        self.display.close()


class _LogStream(io.TextIOBase):
    """A stream whose lines are messages of the log."""

    def write(self, text: str) -> int:
        logger.info("%s", text.rstrip("\n"))
        return len(text)
