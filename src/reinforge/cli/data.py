"""`reinforge data`: imports traces and chat logs, and validates, describes and cleans rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.open_group import OpenGroup
from reinforge.cli.options import (
    DATA,
    JSON,
    OUTPUT,
    option,
    parse_existing_file,
    parse_output_file,
)
from reinforge.cli.output import say, say_json, without_secrets

if TYPE_CHECKING:
    from reinforge.evaluation.row_statistics import LoadedRows

ROWS = click.argument("file", callback=parse_existing_file)


@click.group("data", cls=OpenGroup, around=("import", "reinforge.traces.command:command"))
def command() -> None:
    """Import traces and chat logs as rows to train on; validate, describe and clean rows.

    \b
    Example:
      reinforge data import export.jsonl --output rows.jsonl
      reinforge data validate rows.jsonl
    """


@command.command("validate", cls=Command)
@ROWS
@JSON
def validate_command(file: Path, as_json: bool) -> None:
    """Check that a run can use the rows of a file, and list the algorithms that can train on them.

    \b
    Example:
      reinforge data validate rows.jsonl
    """
    from reinforge.evaluation.row_statistics import load_rows
    from reinforge.trainer.builders.offline import list_offline_choices

    loaded = load_rows(file)
    choices = list_offline_choices(loaded)
    if as_json:
        fits = {each.algorithm: each.problem or None for each in choices}
        say_json(without_secrets({"ok": True, "rows": len(loaded.items), "shape": loaded.shape, "algorithms": fits}))
        return
    say(f"{file}: {len(loaded.items):,} rows of the shape {loaded.shape}, all of them usable")
    for each in choices:
        say(f"  {each.algorithm:<20} {each.problem or each.settings or 'yes'}")


@command.command("stats", cls=Command)
@ROWS
@JSON
def stats_command(file: Path, as_json: bool) -> None:
    """Print what the rows of a file hold: conversations, labels, rewards, lengths, repetitions.

    \b
    Example:
      reinforge data stats rows.jsonl
    """
    from reinforge.evaluation.row_statistics import compute_row_statistics, load_rows

    found = compute_row_statistics(load_rows(file))
    if as_json:
        say_json(without_secrets(found.as_dict()))
        return
    for name, text in found.format_rows():
        say(f"  {name:<10} {text}")


@command.command("dedupe", cls=Command)
@ROWS
@option(
    "output",
    metavar="FILE",
    required=True,
    callback=parse_output_file,
    group=OUTPUT,
    help="JSONL file of rows to write.",
)
@option(
    "threshold",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    group=DATA,
    help="Similarity from which two rows are near-duplicates (shared runs of five words); 1: only equal rows.",
)
@option("overwrite", is_flag=True, group=OUTPUT, help="Replace the output file.")
@JSON
def dedupe_command(file: Path, output: Path, threshold: float, overwrite: bool, as_json: bool) -> None:
    """Write the rows of a file without those that repeat an earlier one.

    Rows are equal if their prompts and replies are; ids, labels and scores do not count, and the first row stays. With
    --threshold below 1, rows whose texts are nearly the same are left out too.

    \b
    Example:
      reinforge data dedupe rows.jsonl --output clean.jsonl --threshold 0.8
    """
    if output.exists() and not overwrite:
        raise click.UsageError(f"{output} exists already; add --overwrite to replace it")
    from reinforge.evaluation.row_statistics import find_repeated_rows, load_rows
    from reinforge.files import replace_file

    loaded = load_rows(file)
    left_out = find_repeated_rows(loaded, threshold)
    kept = [row for index, row in enumerate(loaded.rows) if index not in left_out]
    replace_file(output, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in kept))
    found = _list_left_out(loaded, left_out)
    if as_json:
        say_json(without_secrets({"output": str(output), "rows": len(kept), "left_out": found}))
        return
    say(f"{output}: {len(kept):,} of {len(loaded.items):,} rows")
    for each in found[:20]:
        say(f"  left out {each['row']}: it repeats {each['repeats']} (similarity {each['similarity']:.2f})")
    if len(found) > 20:
        say(f"  and {len(found) - 20:,} more")


def _list_left_out(loaded: LoadedRows, left_out: dict[int, tuple[int, float]]) -> list[dict[str, Any]]:
    places = [loaded.locations[str(item.id)] for item in loaded.items]
    return [
        {"row": places[index], "repeats": places[earlier], "similarity": similarity}
        for index, (earlier, similarity) in sorted(left_out.items())
    ]
