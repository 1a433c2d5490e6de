"""`reinforge redteam`: an attacker is trained against a target, and a report tells how the target fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from reinforge.cli import finetune
from reinforge.cli.chat import plain_text
from reinforge.cli.eval import INTERRUPTED
from reinforge.cli.report import DEBUG, JSON, OVERRIDE, existing_file, guarded
from reinforge.runs.summary import RunSummary

ARMS = {"confirm_base": "before", "confirm_tuned": "after"}


@click.group("redteam")
def command() -> None:
    """Train an attacker against a target, and tell how the target fails.

    The file is one of `reinforge finetune` whose workflow is `_type: redteam`.
    """


def train_command(file: Path | None, **options: Any) -> None:
    """Train the attacker of a file, then report what it found.

    Takes the options of `reinforge finetune`. The run folder also gets attack_report.json and attack_report.txt: how
    often, how soon and how naturally the target failed before and after, and the most different examples.

    \b
    Example:
      reinforge redteam train attack.yml --smoke
      reinforge redteam train attack.yml
    """
    finetune.train(file, at_end=report_on, **options)


command.add_command(
    click.Command(
        "train",
        callback=train_command,
        params=finetune.command.params,
        help=train_command.__doc__,
        context_settings={"show_default": True},
    )
)


def report_on(summary: RunSummary) -> list[str]:
    """Writes the report of a run that reached its verdict; returns its lines."""
    from reinforge.redteam.report import TEXT_FILE, attack_report, write_report
    from reinforge.runs.journal import read_outputs

    outputs = {name: read_outputs(summary.folder, phase) for phase, name in ARMS.items()}
    found = {name: attack_report(each.values()) for name, each in outputs.items() if each}
    if not found:
        return ["  attack       no report: the run did not reach its verdict"]
    return [plain_text(line) for line in write_report(summary.folder, found)] + [
        f"report in {summary.folder / TEXT_FILE}"
    ]


@command.command("eval", context_settings={"show_default": True})
@click.argument("file", callback=existing_file)
@click.option("--model", metavar="RUN|PATH", help="The attacker: a run, a folder or a hub id; default: the file's.")
@click.option("--split", type=click.Choice(["select", "confirm", "train", "all"]), help="Openings; default: select.")
@click.option("--limit", type=click.IntRange(min=1), help="The first so many openings.")
@click.option("--output_dir", "folder", metavar="FOLDER", help="Write attack_report.json and .txt there.")
@OVERRIDE
@JSON
@DEBUG
def eval_command(
    file: Path,
    model: str | None,
    split: str | None,
    limit: int | None,
    folder: str | None,
    overrides: tuple[tuple[str, str], ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Attack a target with an attacker as it is, and report what it found. Trains nothing.

    \b
    Example:
      reinforge redteam eval attack.yml
      reinforge redteam eval attack.yml --model 20260101-120000-ab12 --output_dir found
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.config.loader import load_config
        from reinforge.redteam.report import attack_report, write_report
        from reinforge.runs.progress import PlainProgress, SilentProgress
        from reinforge.trainer.evaluate import EvaluationOptions, evaluate

        progress = SilentProgress() if as_json else PlainProgress()
        options = EvaluationOptions(model=model, split=split, limit=limit, progress=progress)
        try:
            evaluation = asyncio.run(evaluate(load_config(file, overrides=overrides), options))
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        report = attack_report(record.item.output_obj for record in evaluation.records if record.outcome == "ok")
        lines = [*report.lines(evaluation.model), *report.example_lines()]
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_report(Path(folder), {evaluation.model: report})
        told = {"model": evaluation.model, "split": evaluation.split, **report.as_dict()}
        for line in [json.dumps(told, ensure_ascii=False)] if as_json else map(plain_text, lines):
            click.echo(line)
