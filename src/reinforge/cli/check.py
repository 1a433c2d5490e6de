"""`reinforge check FILE`: validates a run without starting it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import (
    COMPAT,
    CONFIG_FILE,
    DATA_PATHS,
    DATASET,
    JSON,
    NAMED_FILE,
    OVERRIDE,
    collect_overrides,
    option,
)
from reinforge.cli.output import say, say_json
from reinforge.errors import ConfigError

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig
    from reinforge.trainer.setup.reach import Reach


@click.command("check", cls=Command, context_settings={"show_default": True})
@CONFIG_FILE
@NAMED_FILE
@DATASET
@option("sample", metavar="N", type=click.IntRange(min=0), default=0, help="Test the rewards on N training examples.")
@option("no_import", is_flag=True, help="Only list what the file would import and reach, and import none of it.")
@OVERRIDE
@COMPAT
@JSON
def command(
    file: Path,
    sample: int,
    no_import: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Validate configuration, data, components, rewards and output folder of a run, without loading a model.

    First lists the Python code that the file imports, the programs that it runs, the environment variables that it
    reads and the hosts that it calls; then imports the code and validates the run. With --sample N, every evaluator
    scores the expected answer and an empty answer of N examples.

    \b
    Example:
      reinforge check run.yml
      reinforge check received.yml --no_import
      reinforge check run.yml --dataset other.jsonl
      reinforge check run.yml --sample 3 -o finetuning.seed 1
    """
    if no_import and sample:
        raise click.UsageError("--no_import and --sample cannot be combined: evaluators are imported")
    from reinforge.config.loader import load_config
    from reinforge.trainer.setup.reach import list_reach

    loaded = load_config(file, overrides=collect_overrides(options, DATA_PATHS), keep_going=True)
    reach = list_reach(loaded)
    if not as_json:
        for name, text in reach.format_rows():
            say(f"  {name:<10} {text}")
    if not no_import:
        _validate(file, loaded, reach, sample, as_json=as_json)
    elif loaded.problems:
        raise ConfigError(loaded.problems)
    elif as_json:
        say_json({"ok": True, "imported": False, "reach": reach.as_dict()})
    else:
        say(f"{file} is valid YAML with known keys; nothing was imported, and data and components were not checked")


def _validate(file: Path, loaded: LoadedConfig, reach: Reach, num_samples: int, *, as_json: bool) -> None:
    from reinforge.trainer.setup.check import check_config

    report = asyncio.run(check_config(loaded, num_samples=num_samples))
    if as_json:
        say_json({**report.as_dict(), "reach": reach.as_dict()})
        raise SystemExit(0 if report.ok else ConfigError.exit_code)
    for row in report.rewards:
        say(
            f"  {row.evaluator} on {row.example_id}: expected answer {_format_score(row.on_expected)}, "
            f"empty answer {_format_score(row.on_empty)}"
        )
    if report.problems:
        raise ConfigError(report.problems)
    for name, value in report.settings:
        say(f"  {name:<10} {value}")
    if report.disk is not None:
        needed = "an unknown amount" if report.disk.needed is None else f"{report.disk.needed / 2**30:.2f} GiB"
        say(f"  {'disk':<10} {report.disk.free / 2**30:.1f} GiB free, checkpoints need {needed}")
    for note in report.notes:
        say(f"  note: {note}")
    say(f"{file} is valid")


def _format_score(score: float | str) -> str:
    return score if isinstance(score, str) else f"{score:g}"
