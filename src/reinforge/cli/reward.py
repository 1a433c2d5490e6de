"""`reinforge reward test FILE`: attacks a file's evaluators."""

from __future__ import annotations

from pathlib import Path

import click

from reinforge.cli.exits import Command, load_file, run_work
from reinforge.cli.options import (
    COMPAT,
    CONFIG_FILE,
    DATA,
    JSON,
    OUTPUT,
    OVERRIDE,
    option,
    parse_existing_file,
)
from reinforge.cli.output import say, say_json, without_secrets

NOT_ROBUST = 3
ATTACKS = ("empty", "copied_prompt", "copied_format", "verbose", "hedged", "injected", "best_of_n")
ATTACKED = "Attacks"  # title of the group of options about bad answers


@click.group("reward")
def command() -> None:
    """Attack the evaluators of a file with answers that deserve no reward.

    \b
    Example:
      reinforge reward test run.yml
    """


@command.command(
    "test",
    cls=Command,
    context_settings={"show_default": True},
    short_help="Score real answers and answers that deserve no reward.",
)
@CONFIG_FILE
@option("limit", metavar="N", type=click.IntRange(min=1), default=8, group=DATA, help="Use the first N examples.")
@option(
    "answers",
    metavar="FILE",
    callback=parse_existing_file,
    group=DATA,
    help="Real answers as JSON Lines: id, output, and label: false for those known to be wrong.",
)
@option(
    "sample",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    group=DATA,
    help="Sample N real answers per example from the agent; loads the model.",
)
@option("evaluator", metavar="NAME", multiple=True, group=DATA, help="Test only this evaluator. Repeatable.")
@option("attack", type=click.Choice(ATTACKS), multiple=True, group=ATTACKED, help="Only this attack. Repeatable.")
@option(
    "best_of",
    metavar="N",
    type=click.IntRange(min=1),
    default=8,
    group=ATTACKED,
    help="Wrong answers that best_of_n tries.",
)
@option(
    "trusted",
    metavar="NAME",
    group=ATTACKED,
    help="Evaluator that tells which real answers are wrong; they join best_of_n. Default: gate.metric.",
)
@option(
    "max_score",
    metavar="S",
    type=float,
    group=OUTPUT,
    help="Report attacks that score more than S; default: more than half of what the expected answer scores.",
)
@option("require_robust", is_flag=True, group=OUTPUT, help="Exit with code 3 if an attack scored too high.")
@OVERRIDE
@COMPAT
@JSON
def test(
    file: Path,
    limit: int,
    answers: Path | None,
    sample: int,
    evaluator: tuple[str, ...],
    attack: tuple[str, ...],
    best_of: int,
    trusted: str | None,
    max_score: float | None,
    require_robust: bool,
    overrides: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Score real answers and answers that deserve no reward, and list those that score too high. Trains nothing.

    The evaluators of the file score the expected answers of a few training examples, and answers that are empty, copied
    from the question, of the right form with another content, verbose, hedged, written to mislead a judge, and the best
    of several wrong ones. Judges are called for each: limit them with --limit, --attack and --evaluator.

    \b
    Example:
      reinforge reward test run.yml
      reinforge reward test run.yml --sample 4 --trusted exact --require_robust
      reinforge reward test run.yml --answers answers.jsonl --attack injected --limit 3
    """
    from reinforge.runs.progress import open_progress
    from reinforge.trainer.reward_test import RewardTestOptions, run_reward_test

    loaded = load_file(file, overrides, as_json=as_json)
    with open_progress(silent=as_json) as progress:
        options = RewardTestOptions(
            limit=limit,
            answers=answers,
            num_samples=sample,
            attacks=attack,
            num_guesses=best_of,
            evaluators=evaluator,
            trusted=trusted,
            max_score=max_score,
            progress=progress,
        )
        report = run_work(run_reward_test(loaded, options), loaded)
    if as_json:
        say_json(without_secrets(report.as_dict()))
    else:
        for line in report.format_lines():
            say(line)
    if require_robust and report.too_high:
        raise SystemExit(NOT_ROBUST)
