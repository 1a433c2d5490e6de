"""`reinforge runs compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from reinforge.cli.exits import Command, run_work
from reinforge.cli.options import JSON, OUTPUT_DIR, option
from reinforge.cli.output import say, say_json, say_table

if TYPE_CHECKING:
    from reinforge.runs.comparison import Rescored, RunComparison

MAX_EXAMPLES = 10  # examples of each direction that are listed


@click.command("compare", cls=Command, short_help="Compare two runs: their models, example by example.")
@click.argument("first", metavar="RUN|last")
@click.argument("second", metavar="RUN|last")
@option(
    "score_with",
    metavar="RUN|last",
    help="Score the recorded outputs of both runs again by the evaluators of this one of them.",
)
@OUTPUT_DIR
@JSON
def compare_command(first: str, second: str, score_with: str | None, output_dir: str, as_json: bool) -> None:
    """Compare the trained models of two runs, and their configurations.

    Differences are the second run minus the first. They are taken example by example where both runs were evaluated on
    the same examples, and otherwise between the means. Evaluators of the same name that differ in code, settings or
    judge are not compared; --score_with scores the outputs of both runs again by those of one of them.

    \b
    Example:
      reinforge runs compare first-try last
      reinforge runs compare first-try last --score_with last
      reinforge runs compare first-try last --json
    """
    from reinforge.runs.comparison import compare_runs
    from reinforge.runs.run_folder import find_run

    runs = [find_run(name, Path(output_dir)) for name in (first, second)]
    rescored = None if score_with is None else _rescore(runs, find_run(score_with, Path(output_dir)))
    found = compare_runs(runs[0], runs[1], rescored)
    if as_json:
        say_json(found.as_dict())
    else:
        _print_comparison(found)


def _rescore(runs: list[Path], judge: Path) -> Rescored:
    from reinforge.errors import ConfigError, Problem
    from reinforge.trainer.rescoring import FLAG, rescore
    from reinforge.trainer.resume import load_run_config

    if judge not in runs:
        raise ConfigError(
            Problem(FLAG, f"{judge.name} is neither of the two runs", f"name {runs[0].name} or {runs[1].name}")
        )
    loaded = load_run_config(judge)
    return run_work(rescore(runs, judge, loaded), loaded)


def _print_comparison(found: RunComparison) -> None:
    from reinforge.evaluation.statistics import format_interval
    from reinforge.runs.episodes import count_changes
    from reinforge.runs.run_folder import format_local_time

    runs = (found.first, found.second)
    for run in runs:
        head = run.summary.headline() if run.summary is not None else run.status
        say(f"{run.folder.name} {head} (started {format_local_time(run.started_s) or 'at an unknown time'})")
    say(f"\n{found.pairing}")
    if found.metrics:
        rows = [("metric", *(run.folder.name for run in runs), "difference, 95 % interval", "p-value")]
        for row in found.metrics:
            means = (format_interval(each.mean, each.ci_low, each.ci_high) for each in (row.first, row.second))
            rows.append((row.metric, *means, *row.describe_difference()))
        say_table(rows)
    say(found.conclude())
    if found.examples:
        better, same, worse = count_changes(found.examples)
        say(f"\n{better:,} examples score higher in {runs[1].folder.name}, {same:,} the same, {worse:,} lower")
        changed = [example for example in found.examples if example.change != 0]
        listed = changed if len(changed) <= 2 * MAX_EXAMPLES else [*changed[:MAX_EXAMPLES], *changed[-MAX_EXAMPLES:]]
        for example in listed:
            say(f"  {example.example_id}: {example.first:.3g} -> {example.second:.3g}")
    say("\nsettings that differ" if found.changes else "\nthe configurations are equal")
    for change in found.changes:
        say(f"  {change}")
    for note in found.notes:
        say(f"note: {note}")
