"""`reinforge report`: writes the HTML report of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, OUTPUT_DIR, option, parse_output_file
from reinforge.cli.output import say, say_json
from reinforge.errors import StorageError


@click.command("report", cls=Command, short_help="Write the HTML report of a run: curves, verdict, episodes, settings.")
@click.argument("run", metavar="RUN|last")
@option(
    "output",
    metavar="FILE",
    callback=parse_output_file,
    help="File to write; default: report.html in the run folder.",
)
@OUTPUT_DIR
@JSON
def command(run: str, output: Path | None, output_dir: str, as_json: bool) -> None:
    """Write the HTML report of a run: one file that opens in a browser and can be sent to a colleague.

    Every run writes its report when it ends; this command regenerates it, also while the run is training.

    \b
    Example:
      reinforge report last
      reinforge report 20260101-120000-ab12 --output result.html
    """
    from reinforge.runs.manifest import list_files, unlist
    from reinforge.runs.page.page import PAGE, write_page
    from reinforge.runs.run_folder import find_run

    folder = find_run(run, Path(output_dir))
    if output is None:
        _while_unused(folder, lambda: unlist(folder, re.compile(re.escape(PAGE))))
    path = write_page(folder, path=output)  # without the lock, which tells a run that is in progress
    if output is None:
        _while_unused(folder, lambda: list_files(folder))
    if as_json:
        say_json({"page": str(path)})
    else:
        say(str(path))


def _while_unused(folder: Path, work: Callable[[], None]) -> None:
    """Does something with the manifest of a run; a process that is using the run lists the files at its end."""
    from reinforge.runs.journal.journal import lock_run

    try:
        lock = lock_run(folder)
    except StorageError:
        return
    try:
        work()
    finally:
        lock.release()
