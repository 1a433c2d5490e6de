"""`reinforge runs fetch`: gets the copy of a run from object storage."""

from __future__ import annotations

from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, OUTPUT_DIR
from reinforge.cli.output import say, say_json
from reinforge.runs.run_folder import format_size, measure_size
from reinforge.runs.summary import describe_resume
from reinforge.trackers.mirror import fetch_run


@click.command("fetch", cls=Command, short_help="Download the copy of a run, to resume it here.")
@click.argument("url")
@OUTPUT_DIR
@JSON
def command(url: str, output_dir: str, as_json: bool) -> None:
    """Download the copy of a run that the tracker `mirror` made, to resume it on this machine.

    \b
    Example:
      reinforge runs fetch s3://bucket/runs/20260101-120000-ab12
      reinforge finetune run.yml --resume 20260101-120000-ab12
    """
    folder = fetch_run(url, Path(output_dir))
    if as_json:
        say_json({"folder": str(folder), "num_bytes": measure_size(folder)})
        return
    say(f"fetched {folder}, {format_size(measure_size(folder))}")
    say(f"resume with: {describe_resume(folder)}")
