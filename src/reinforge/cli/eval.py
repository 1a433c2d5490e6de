"""`reinforge eval FILE`: an evaluation without training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from reinforge.cli.options import (
    CONFIG_FILE,
    DATA,
    DEBUG,
    JSON,
    OUTPUT,
    OVERRIDE,
    GroupedCommand,
    option,
    parse_output_file,
)
from reinforge.cli.report import INTERRUPTED, exit_on_error

SPLITS = click.Choice(["select", "confirm", "train", "all"])


@click.command("eval", cls=GroupedCommand, context_settings={"show_default": True})
@CONFIG_FILE
@option(
    "model", metavar="RUN|PATH", group=DATA, help="Run, folder or Hugging Face model id; default: the file's model."
)
@option(
    "split", type=SPLITS, group=DATA, help="Split to evaluate; default: select, or all if finetuning is not enabled."
)
@option("limit", metavar="N", type=click.IntRange(min=1), group=DATA, help="Evaluate only the first N examples.")
@option("output", callback=parse_output_file, metavar="FILE", group=OUTPUT, help="Write all episodes as JSON Lines.")
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
    """Evaluate the agent of a file, with its own model or with that of a run. Trains nothing.

    Prints the mean of each evaluator with its 95 % confidence interval. Avoid the split `confirm` before a run: its
    verdict is only valid if no decision was based on those examples.

    \b
    Example:
      reinforge eval run.yml
      reinforge eval run.yml --model 20260101-120000-ab12 --split confirm --json
    """
    with exit_on_error(as_json=as_json, debug=debug):
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
        lines = [json.dumps(evaluation.as_dict(), ensure_ascii=False)] if as_json else evaluation.format_lines()
        for line in lines:
            click.echo(line)
