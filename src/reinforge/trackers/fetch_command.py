"""`reinforge runs fetch`: gets the copy of a run from object storage."""

from __future__ import annotations

from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, OUTPUT_DIR, option
from reinforge.cli.output import say, say_json
from reinforge.errors import StorageError
from reinforge.runs.run_folder import format_size, measure_size
from reinforge.runs.summary import describe_resume
from reinforge.trackers.mirror import fetch_run


@click.command("fetch", cls=Command, short_help="Download the copy of a run, to resume it here.")
@click.argument("url")
@option("allow_missing", is_flag=True, help="Succeed even if no copy exists yet.")
@OUTPUT_DIR
@JSON
def command(url: str, allow_missing: bool, output_dir: str, as_json: bool) -> None:
    """Download the copy of a run that the tracker `mirror` made, to resume it on this machine.

    \b
    Example:
      reinforge runs fetch s3://bucket/runs/20260101-120000-ab12
      reinforge finetune run.yml --resume 20260101-120000-ab12
    """
    folder = fetch_run(url, Path(output_dir))
    if folder is None and not allow_missing:
        raise StorageError(f"no copy of a run found at {url}; the URL of a copy ends with the name of the run")
    if as_json:
        say_json({"folder": None} if folder is None else {"folder": str(folder), "num_bytes": measure_size(folder)})
        return
    if folder is None:
        say(f"no copy found at {url} yet")
        return
    say(f"fetched {folder}, {format_size(measure_size(folder))}")
    say(f"resume with: {describe_resume(folder)}")
