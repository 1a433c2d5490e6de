"""Stops a run on Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from reinforge.errors import Interrupted
from reinforge.runs.summary import RunSummary
from reinforge.trainer.options import RunOptions


async def run_with_signals(work: Coroutine[Any, Any, RunSummary], options: RunOptions) -> RunSummary:
    """Runs `work`; the first signal cancels it, a second one ends the process.

    Raises:
        Interrupted: A signal stopped the run.
    """
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def stop(number: int, frame: object) -> None:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        loop.call_soon_threadsafe(task.cancel)

    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread, which then handles signals itself
        for number in (signal.SIGINT, signal.SIGTERM):
            # not loop.add_signal_handler: it waits for an agent that blocks the loop, and so would the second signal
            before[number] = signal.signal(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not seen:
            raise
        interrupted = Interrupted(signal.Signals(seen[0]).name, 128 + seen[0])
        if options.folder is not None:
            interrupted.add_note(describe_kept_work(options.folder))
        raise interrupted from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_kept_work(folder: Path) -> str:
    """Returns where the work of an unfinished run is kept, and the command that resumes it."""
    kept = f"saved in {folder}: episodes, metrics and checkpoints so far, report.md, run.log"
    return f"{kept}\nresume with: reinforge finetune --resume {folder}"
