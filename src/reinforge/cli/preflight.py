"""`reinforge preflight FILE`: whether training can help, how long it takes, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command, load_file, run_work
from reinforge.cli.options import (
    COMPAT,
    CONFIG_FILE,
    DATA,
    DATA_PATHS,
    ENDPOINT,
    ENDPOINT_TIMEOUT,
    JSON,
    LIMITS,
    OVERRIDE,
    RESULT_JSON_PATH,
    collect_overrides,
    option,
    parse_existing_file,
)
from reinforge.cli.output import say, say_json, without_secrets

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig
    from reinforge.trainer.preflight.costs import TokenPrice

PRICES = "Prices"


@click.command("preflight", cls=Command, context_settings={"show_default": True})
@CONFIG_FILE
@option(
    "examples", metavar="N", type=click.IntRange(min=2), default=20, group=DATA, help="Training examples to sample."
)
@option(
    "samples", metavar="N", type=click.IntRange(min=2), default=4, group=DATA, help="Replies to sample per example."
)
@ENDPOINT
@ENDPOINT_TIMEOUT
@RESULT_JSON_PATH
@option(
    "probe_seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    group=LIMITS,
    help="Most seconds that the probe takes after loading the model.",
)
@option(
    "price",
    metavar="ENTRY INPUT OUTPUT",
    type=(str, click.FloatRange(min=0), click.FloatRange(min=0)),
    multiple=True,
    group=PRICES,
    help="Price of a million prompt and a million sampled tokens of an entry of llms. Repeatable.",
)
@option(
    "training_price",
    metavar="PRICE",
    type=click.FloatRange(min=0),
    group=PRICES,
    help="Price of a million tokens of training, where a service trains.",
)
@option(
    "cluster",
    metavar="PLAN",
    callback=parse_existing_file,
    help="Predict the run on the GPUs of this file instead, without running anything.",
)
@OVERRIDE
@COMPAT
@JSON
def command(
    file: Path,
    examples: int,
    samples: int,
    probe_seconds: float,
    price: tuple[tuple[str, float, float], ...],
    training_price: float | None,
    cluster: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Sample a few training examples, and predict whether training can help and how long it takes.

    Runs the agent of the file, scores some answers twice, and trains a little on weights that are thrown away. Prints
    the base rate with its interval, the share of groups with training signal, the noise of the evaluators, lengths,
    time, sizes for runs of 10, 30 and 120 minutes, memory, the cost of paid models, the smallest improvement that the
    verdict can show, and a recommendation with its reason. Does not touch the `confirm` examples. A run of the same
    configuration and data shows how far off it was.

    \b
    Example:
      reinforge preflight run.yml
      reinforge preflight run.yml --examples 50 --probe_seconds 120
      reinforge preflight run.yml --price judge 0.15 0.60 --json
      reinforge preflight run.yml --cluster plan.yml
    """
    from reinforge.runs.progress import open_progress
    from reinforge.trainer.preflight.analysis import preflight
    from reinforge.trainer.preflight.costs import TokenPrice
    from reinforge.trainer.preflight.probe import PreflightOptions

    loaded = load_file(file, collect_overrides(flags, DATA_PATHS), as_json=as_json)
    if cluster is not None:
        _print_forecast(loaded, cluster, as_json=as_json)
        return
    prices = {entry: TokenPrice(prompt, completion) for entry, prompt, completion in price}
    _refuse_unknown(prices, loaded)
    with open_progress(silent=as_json) as progress:
        options = PreflightOptions(
            num_examples=examples,
            num_samples=samples,
            max_probe_s=probe_seconds,
            prices=prices,
            training_price=training_price,
            progress=progress,
        )
        report = run_work(preflight(loaded, options), loaded)
    if as_json:
        say_json(without_secrets(report.as_dict()))
        return
    for line in report.format_lines():
        say(line)


def _print_forecast(loaded: LoadedConfig, plan: Path, *, as_json: bool) -> None:
    from reinforge.registry import load_named

    found = load_named("reinforge.scale.planning.plan:forecast_file")(loaded, plan)
    if as_json:
        say_json(found.as_dict())
        return
    for line in found.lines:
        say(line)


def _refuse_unknown(prices: dict[str, TokenPrice], loaded: LoadedConfig) -> None:
    from reinforge.errors import ConfigError, Problem, did_you_mean

    llms = loaded.config.llms
    unknown = [entry for entry in prices if entry not in llms]
    if unknown:
        listed = ", ".join(llms) or "none"
        raise ConfigError(
            [
                Problem("--price", f'llms has no entry "{entry}"{did_you_mean(entry, llms) or ";"} it has {listed}')
                for entry in unknown
            ]
        )
