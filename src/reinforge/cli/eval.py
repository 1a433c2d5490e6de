"""`reinforge eval FILE`: an evaluation without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command, load_file, run_work
from reinforge.cli.options import (
    COMPAT,
    DATA,
    DATA_PATHS,
    DATASET,
    ENDPOINT,
    ENDPOINT_TIMEOUT,
    ENVIRONMENT,
    JSON,
    NAMED_FILE,
    OUTPUT,
    OVERRIDE,
    RESULT_JSON_PATH,
    collect_overrides,
    option,
    parse_existing_file,
    parse_output_file,
)
from reinforge.cli.output import say, say_json

SPLITS = click.Choice(["select", "confirm", "train", "all"])


@click.command("eval", cls=Command, context_settings={"show_default": True})
@click.argument("file", required=False, callback=parse_existing_file)
@NAMED_FILE
@ENVIRONMENT
@option(
    "model",
    metavar="RUN|PATH",
    group=DATA,
    help="Run, `last`, folder, GGUF file, pip:PACKAGE or Hugging Face model id; default: the file's model.",
)
@option(
    "split", type=SPLITS, group=DATA, help="Split to evaluate; default: select, or all if finetuning is not enabled."
)
@option("limit", metavar="N", type=click.IntRange(min=1), group=DATA, help="Evaluate only the first N examples.")
@option("reps", metavar="N", type=click.IntRange(min=1), group=DATA, help="Episodes of each example; default: 1.")
@DATASET
@ENDPOINT
@ENDPOINT_TIMEOUT
@RESULT_JSON_PATH
@option("output", callback=parse_output_file, metavar="FILE", group=OUTPUT, help="Write all episodes as JSON Lines.")
@OVERRIDE
@COMPAT
@JSON
def command(
    file: Path | None,
    model: str | None,
    split: str | None,
    limit: int | None,
    reps: int | None,
    output: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Evaluate the agent of a file, with its own model or with that of a run. Trains nothing.

    Prints the mean of each evaluator with its 95 % confidence interval. Avoid the split `confirm` before a run: its
    verdict is only valid if no decision was based on those examples. `eval.general.output_dir` names a folder for the
    answers and the scores. With `finetuning.gate.reference`, the reference answers the same examples, and a line says
    whether the model is not worse than it.

    \b
    Example:
      reinforge eval run.yml
      reinforge eval run.yml --model 20260101-120000-ab12 --split confirm --json
      reinforge eval run.yml --endpoint http://127.0.0.1:9000/run --result_json_path '$.answer'
    """
    from reinforge.runs.progress import open_progress
    from reinforge.trainer.evaluate import EvaluationOptions, evaluate

    if file is None and flags["environment"] is None:
        raise click.UsageError("pass one configuration file, reinforge eval FILE, or --environment")
    loaded = load_file(file, collect_overrides(flags, DATA_PATHS), as_json=as_json)
    folder = loaded.config.eval.general.output_dir
    with open_progress(silent=as_json) as progress:
        options = EvaluationOptions(model, split, limit, reps, progress, output_dir=folder, with_reference=True)
        evaluation = run_work(evaluate(loaded, options), loaded)
    if output is not None:
        evaluation.write(output)
    if as_json:
        say_json(evaluation.as_dict())
        return
    for line in evaluation.format_lines():
        say(line)
