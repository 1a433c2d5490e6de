"""`run.log`: what the user saw and every message of the package, and a warning when nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
from collections.abc import AsyncIterator, Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO, cast

from reinforge.files import open_private
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.progress import PlainProgress, RunProgress, SharedProgress
from reinforge.safe_text import CleanFormatter
from reinforge.trainer.context import RunContext

LOG = "run.log"
MAX_BYTES = 16 << 20

logger = logging.getLogger(__name__)


class RunLogHandler(RotatingFileHandler):
    """Writes messages to the log of a run; what cannot be written is left out, since it must not stop the run."""

    def __init__(self, folder: Path):
        super().__init__(folder / LOG, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=open_private)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves the message out: a full disk ends the run where its work is written, with the path."""


class LoggedProgress(SharedProgress):
    """Passes the events of a run to the display and writes its permanent lines to the log."""

    def __init__(self, display: RunProgress):
        super().__init__(display, PlainProgress(cast(TextIO, _LogStream())))


class _LogStream(io.TextIOBase):
    def write(self, text: str) -> int:
        logger.info("%s", text.rstrip("\n"))
        return len(text)


WATCHDOG_S = 5.0  # seconds between two checks


@contextlib.contextmanager
def log_to_folder(folder: Path) -> Iterator[None]:
    handler = RunLogHandler(folder)
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("reinforge")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        handler.close()


@contextlib.asynccontextmanager
async def watch_progress(context: RunContext, runner: EpisodeRunner) -> AsyncIterator[None]:
    """Warns once, naming the stage, each time nothing has happened for `limits.stage_timeout_s`."""

    async def watch() -> None:
        warned_s = 0.0
        while True:
            await asyncio.sleep(min(WATCHDOG_S, context.limits.stage_timeout_s / 2))
            silent = time.monotonic() - context.last_progress_s
            if silent >= context.limits.stage_timeout_s and warned_s != context.last_progress_s:
                warned_s = context.last_progress_s
                epoch = "" if context.stage_epoch is None else f" of epoch {context.stage_epoch}"
                text = (
                    f"no progress for {silent:.0f} s in stage {context.stage_name}{epoch}: "
                    f"{runner.status.num_running} episodes are running, {runner.status.num_abandoned} were abandoned"
                )
                context.progress.note(text)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
