"""`reinforge redteam`: trains an attacker against a target, and reports how the target fails."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reinforge.cli import finetune
from reinforge.cli.eval import SPLITS
from reinforge.cli.exits import Command
from reinforge.cli.options import CONFIG_FILE, DATA, JSON, OUTPUT, OVERRIDE, option
from reinforge.cli.output import say, say_json
from reinforge.runs.summary import RunSummary

ARMS = {"confirm_base": "before", "confirm_tuned": "after"}


@click.group("redteam")
def command() -> None:
    """Train an attacker against a target, and report how the target fails.

    The file is a configuration for `reinforge finetune` with the workflow `_type: redteam`.

    \b
    Example:
      reinforge redteam train attack.yml
    """


def train_command(file: Path | None, **options: Any) -> None:
    """Train the attacker of a file, then report the attacks that it found.

    Has the options of `reinforge finetune`. Also writes attack_report.json and attack_report.txt to the run folder:
    how often, how early and with how natural attacks the target failed, before and after training, with diverse
    examples.

    \b
    Example:
      reinforge redteam train attack.yml --smoke
      reinforge redteam train attack.yml
    """
    finetune.train(file, at_end=write_attack_report, **options)


command.add_command(
    Command(
        "train",
        callback=train_command,
        params=[each for each in finetune.command.params if each.name != "debug"],
        help=train_command.__doc__,
        short_help="Train the attacker of a file, and report the attacks.",
        context_settings={"show_default": True},
    )
)


def write_attack_report(summary: RunSummary) -> list[str]:
    from reinforge.redteam.report import TEXT_FILE, build_attack_report, write_report
    from reinforge.runs.episodes import read_outputs

    outputs = {name: read_outputs(summary.folder, phase) for phase, name in ARMS.items()}
    found = {name: build_attack_report(each.values()) for name, each in outputs.items() if each}
    if not found:
        return ["  attack       no report: the run did not reach its verdict"]
    return [*write_report(summary.folder, found), f"report in {summary.folder / TEXT_FILE}"]


@command.command(
    "eval",
    cls=Command,
    context_settings={"show_default": True},
    short_help="Attack the target without training, and report the attacks.",
)
@CONFIG_FILE
@option("model", metavar="RUN|PATH", group=DATA, help="The attacker: run, folder or model id; default: the file's.")
@option(
    "split",
    type=SPLITS,
    group=DATA,
    help="Split that the openings come from; default: select, or all if finetuning is not enabled.",
)
@option("limit", metavar="N", type=click.IntRange(min=1), group=DATA, help="Use only the first N openings.")
@option("output_dir", metavar="FOLDER", group=OUTPUT, help="Write attack_report.json and attack_report.txt here.")
@OVERRIDE
@JSON
def eval_command(
    file: Path, output_dir: str | None, overrides: tuple[tuple[str, str], ...], as_json: bool, **options: Any
) -> None:
    """Attack a target without training the attacker, and report the attacks that it found.

    \b
    Example:
      reinforge redteam eval attack.yml
      reinforge redteam eval attack.yml --model 20260101-120000-ab12 --output_dir found
    """
    from reinforge.config.loader import load_config
    from reinforge.redteam.report import build_attack_report, write_report
    from reinforge.runs.progress import open_progress
    from reinforge.trainer.evaluate import EvaluationOptions, evaluate
    from reinforge.trainer.options import LiveRun, RunOptions
    from reinforge.trainer.shutdown import run_interruptible

    loaded = load_config(file, overrides=overrides)
    live = LiveRun(blocked_s=loaded.config.finetuning.limits.episode_timeout_s)
    with open_progress(silent=as_json) as progress:
        asked = EvaluationOptions(progress=progress, **options)
        evaluation = run_interruptible(evaluate(loaded, asked), RunOptions(live=live))
    report = build_attack_report(record.item.output_obj for record in evaluation.records if record.outcome == "ok")
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write_report(Path(output_dir), {evaluation.model: report})
    if as_json:
        say_json({"model": evaluation.model, "split": evaluation.split, **asdict(report)})
        return
    for line in [*report.lines(evaluation.model), *report.example_lines()]:
        say(line)
