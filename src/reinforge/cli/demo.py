"""`reinforge demo`: makes the bundled agent better and shows one game before and one after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reinforge.cli.finetune import find_begun
from reinforge.cli.report import run_and_exit

NEXT = """\
next:
  look at the plot     {folder}/reward_plot.png
  read the report      {folder}/report.md
  train your own task  examples/own_task.py, docs/quickstart.md"""


@click.command("demo", context_settings={"show_default": True})
@click.option("--long", "long_run", is_flag=True, help="Train longer for a stronger agent (up to 12 minutes).")
@click.option("--seed", type=int, help="Seed of the run; default: the one of the file, 0.")
@click.option("-o", "--override", "overrides", nargs=2, multiple=True, metavar="PATH VALUE", help="Set any key.")
@click.option("--run_name", "--run-name", help="Name of the run folder; default: made from the date.")
@click.option("--resume", metavar="RUN|last", help="Go on with a demo that was stopped.")
@click.option("--json", "as_json", is_flag=True, help="Write the summary as JSON on stdout.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def command(
    long_run: bool,
    seed: int | None,
    overrides: tuple[tuple[str, str], ...],
    run_name: str | None,
    resume: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Make the bundled tic-tac-toe agent better, on this machine's CPU, in minutes.

    The small model that it starts from is made on first use and cached below REINFORGE_HOME.

    \b
    Example:
      reinforge demo
      reinforge demo --long --seed 1
      reinforge demo --resume last
    """
    if resume is not None and (long_run or seed is not None or run_name is not None):
        raise click.UsageError("--resume goes on with a demo as it is: leave --long, --seed and --run_name out")
    chosen = [*overrides] if seed is None else [("finetuning.seed", str(seed)), *overrides]

    def run() -> Any:
        from reinforge.config.loader import load_config
        from reinforge.runs.progress import SilentProgress, default_progress
        from reinforge.tasks.tic_tac_toe import DEMO, DEMO_LONG
        from reinforge.trainer.run import RunOptions, run_config

        options = RunOptions(run_name, SilentProgress() if as_json else default_progress())
        if resume is not None:
            options.resume, loaded = find_begun(resume, None, chosen)
        else:
            loaded = load_config(DEMO_LONG if long_run else DEMO, overrides=chosen)
        return run_config(loaded, options)

    summary = run_and_exit(run, as_json=as_json, debug=debug)
    if not as_json:
        _show_games(summary.folder)
        click.echo(NEXT.format(folder=summary.folder))


def _show_games(folder: Path) -> None:
    from reinforge.runs.journal import read_outputs
    from reinforge.tasks.tic_tac_toe.show import choose_example, game_lines

    before, after = read_outputs(folder, "confirm_base"), read_outputs(folder, "confirm_tuned")
    example = choose_example(before, after)
    if example is None:
        return
    for title, games in (("before", before), ("after", after)):
        click.echo("")
        for line in game_lines(f"{title} ({example})", games[example]):
            click.echo(line)
    click.echo("")
