"""`reinforge check FILE`: validates a run without starting it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from reinforge.cli.options import CONFIG_FILE, DEBUG, JSON, OVERRIDE, GroupedCommand, GroupedOption
from reinforge.cli.report import exit_on_error


@click.command("check", cls=GroupedCommand, context_settings={"show_default": True})
@CONFIG_FILE
@click.option(
    "--sample",
    "num_samples",
    cls=GroupedOption,
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="Test the rewards on N training examples.",
)
@OVERRIDE
@JSON
@DEBUG
def command(file: Path, num_samples: int, overrides: tuple[tuple[str, str], ...], as_json: bool, debug: bool) -> None:
    """Validate configuration, data, components, rewards and disk space of a run, without loading a model.

    With --sample N, every evaluator scores the expected answer and an empty answer of N examples.

    \b
    Example:
      reinforge check run.yml
      reinforge check run.yml --sample 3 -o finetuning.seed 1
    """
    with exit_on_error(as_json=as_json, debug=debug):
        from reinforge.config.loader import load_config
        from reinforge.errors import ConfigError
        from reinforge.trainer.setup.check import check_config

        report = asyncio.run(check_config(load_config(file, overrides=overrides), num_samples=num_samples))
        if as_json:
            click.echo(json.dumps(report.as_dict(), ensure_ascii=False))
            raise SystemExit(0 if report.ok else ConfigError.exit_code)
        for row in report.rewards:
            click.echo(
                f"  {row.evaluator} on {row.example_id}: expected answer {_format_score(row.on_expected)}, "
                f"empty answer {_format_score(row.on_empty)}"
            )
        if report.problems:
            raise ConfigError(report.problems)
        for name, value in report.settings:
            click.echo(f"  {name:<10} {value}")
        if report.disk is not None:
            needed = "an unknown amount" if report.disk.needed is None else f"{report.disk.needed / 2**30:.2f} GiB"
            click.echo(f"  {'disk':<10} {report.disk.free / 2**30:.1f} GiB free, checkpoints need {needed}")
        for note in report.notes:
            click.echo(f"  note: {note}")
        click.echo(f"{file} is valid")


def _format_score(score: float | str) -> str:
    return score if isinstance(score, str) else f"{score:g}"
