"""`reinforge watch`: follows a run in the terminal until it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import OUTPUT_DIR
from reinforge.cli.output import say, say_as_is

POLL_S = 1.0  # seconds between two looks into the journal


@click.command("watch", cls=Command, short_help="Follow a run in the terminal until it ends.")
@click.argument("run", metavar="RUN|last")
@OUTPUT_DIR
def command(run: str, output_dir: str) -> None:
    """Follow a run in the terminal until it ends: epochs, validations, progress, and the summary.

    It only reads the run folder, so stopping it does not stop the run. For a run that has ended it prints all of that
    at once.

    \b
    Example:
      reinforge watch last
      reinforge watch 20260101-120000-ab12 > progress.txt
    """
    from reinforge.runs.progress import default_progress
    from reinforge.runs.replay import JournalClock, RunReplay
    from reinforge.runs.run_folder import find_run

    folder = find_run(run, Path(output_dir))
    clock = JournalClock()
    progress = default_progress(sys.stdout, clock=clock)
    watcher = RunReplay(folder, progress, clock)
    try:
        while watcher.update():
            progress.refresh()
            sys.stdout.flush()  # ends `watch | head`: the display itself only falls silent when its pipe is closed
            time.sleep(POLL_S)
    finally:
        progress.close()
    _print_end(folder)


def _print_end(folder: Path) -> None:
    from reinforge.runs.run_folder import read_overview
    from reinforge.runs.summary import SCREEN_ROWS

    overview = read_overview(folder)
    if overview.summary is not None:
        for line in overview.summary.closing_lines(sys.stdout.isatty(), SCREEN_ROWS):
            say_as_is(line)
        return
    say(f"{folder.name} {overview.status}" + (f": {overview.reason}" if overview.reason else ""))
    if overview.resume_command:
        say(f"resume with: {overview.resume_command}")
