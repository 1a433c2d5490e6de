"""Watches a run: its log file, and a warning when nothing happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.run_log import RunLogHandler
from reinforge.safe_text import CleanFormatter
from reinforge.trainer.context import RunContext

WATCHDOG_S = 5.0
"""Seconds between two checks."""


@contextlib.contextmanager
def log_to_folder(folder: Path) -> Iterator[None]:
    """Writes the package's log to `run.log` while the run lasts."""
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
