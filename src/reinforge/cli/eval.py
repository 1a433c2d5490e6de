"""`reinforge eval FILE`: an evaluation alone, with intervals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from reinforge.cli.report import DEBUG, JSON, OVERRIDE, existing_file, guarded

INTERRUPTED = 130


def writable_file(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """Turns a file to write into a path; a folder that is missing is a usage error, before any work."""
    path = Path(value) if value is not None else None
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise click.BadParameter(f"{value} cannot be written: no such folder", context, parameter)
    return path


@click.command("eval", context_settings={"show_default": True})
@click.argument("file", callback=existing_file)
@click.option("--model", metavar="RUN|PATH", help="A run, a folder or a hub id instead of the file's model.")
@click.option(
    "--split", type=click.Choice(["select", "confirm", "train", "all"]), help="Examples; default: select, or all."
)
@click.option("--limit", type=click.IntRange(min=1), help="The first so many examples.")
@click.option("--output", callback=writable_file, metavar="FILE", help="Write every episode as a line of JSON.")
@OVERRIDE
@JSON
@DEBUG
def command(
    file: Path,
    model: str | None,
    split: str | None,
    limit: int | None,
    output: Path | None,
    overrides: tuple[tuple[str, str], ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Evaluate the agent of a file, as it is or with the model of a run. Trains nothing.

    One line an evaluator: its mean and 95 % interval over the examples. Without --split it is `select` if the file
    trains, else the whole dataset; `confirm` is what a run's verdict rests on, so each look at it costs some of that.

    \b
    Example:
      reinforge eval run.yml
      reinforge eval run.yml --model 20260101-120000-ab12 --split confirm --json
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.config.loader import load_config
        from reinforge.runs.progress import PlainProgress, SilentProgress
        from reinforge.trainer.evaluate import EvaluationOptions, evaluate

        loaded = load_config(file, overrides=overrides)
        progress = SilentProgress() if as_json else PlainProgress()
        options = EvaluationOptions(model=model, split=split, limit=limit, progress=progress)
        try:
            evaluation = asyncio.run(evaluate(loaded, options))
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        if output is not None:
            evaluation.write(output)
        lines = [json.dumps(evaluation.as_dict(), ensure_ascii=False)] if as_json else evaluation.lines()
        for line in lines:
            click.echo(line)
