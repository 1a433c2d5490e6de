"""Runs work that a signal can stop: Ctrl-C, SIGTERM, SIGHUP and SIGUSR1."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from reinforge.errors import Interrupted, StorageError
from reinforge.rollout.isolation.containment import close_loop, create_loop, run_loop
from reinforge.runs.resuming import describe_resume
from reinforge.runs.summary import RunSummary, load_summary
from reinforge.trainer.options import RunOptions
from reinforge.trainer.shutdown import ShutdownThread

T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T], options: RunOptions) -> T:
    """Runs `work` on an event loop of its own; a signal cancels it, and `ShutdownThread` ends what does not end."""
    loop = create_loop()
    task = loop.create_task(work)
    with ShutdownThread(loop, task, options.live) as guard:
        try:
            return run_loop(loop, task)
        except asyncio.CancelledError:
            if guard.received is None:
                raise
            raise build_interruption(guard.received, options) from None
        finally:
            close_loop(loop)


def is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def build_interruption(received: signal.Signals, options: RunOptions) -> Interrupted:
    """Returns the error of a run that a signal stopped; says where its work is kept and how to resume it."""
    interrupted = Interrupted(received.name, 128 + received)
    if options.folder is not None:
        interrupted.add_note(describe_kept_work(options.folder, _read_summary(options.folder)))
    return interrupted


def _read_summary(folder: Path) -> RunSummary | None:
    try:
        return load_summary(folder)
    except StorageError:  # the run was stopped before it wrote one
        return None


def describe_kept_work(folder: Path, summary: RunSummary | None = None) -> str:
    """Returns where the work of an unfinished run is kept, its best checkpoint, and how to resume it."""
    lines = [f"saved in {folder}: episodes, metrics and checkpoints so far, report.md, run.log"]
    if summary is not None and summary.best is not None and (summary.checkpoint or summary.status == "stopped"):
        lines.append(f"best so far: {summary.describe_best()}")
    if summary is None or summary.can_resume:
        lines.append(f"resume with: {describe_resume(folder)}")
    return "\n".join(lines)
