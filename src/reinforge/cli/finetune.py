"""`reinforge finetune FILE`: a whole run from a YAML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reinforge.cli.report import existing_file, run_and_exit


@click.command("finetune", context_settings={"show_default": True})
@click.argument("file", required=False, callback=existing_file)
@click.option("--config_file", "--config-file", callback=existing_file, help="The YAML file, as an option.")
@click.option("--dataset", help="Dataset file that replaces the one of the YAML file.")
@click.option("-o", "--override", "overrides", nargs=2, multiple=True, metavar="PATH VALUE", help="Set any key.")
@click.option("--validation_interval", "--validation-interval", type=int, help="Epochs between validations.")
@click.option("--run_name", "--run-name", help="Name of the run folder; default: made from the date.")
@click.option("--max_minutes", "--max-minutes", type=float, help="Stop after this many minutes (exit 5).")
@click.option("--max_tokens", "--max-tokens", type=int, help="Stop after this many sampled tokens (exit 5).")
@click.option("--require_improvement", "--require-improvement", is_flag=True, help="Exit 3 unless promoted.")
@click.option("--json", "as_json", is_flag=True, help="Write the summary as JSON on stdout.")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def command(
    file: Path | None,
    config_file: Path | None,
    as_json: bool,
    debug: bool,
    require_improvement: bool,
    run_name: str | None,
    **options: Any,
) -> None:
    r"""Train the model behind an agent, as a YAML file says.

    \b
    Example:
      reinforge finetune run.yml
      reinforge finetune run.yml -o finetuning.num_epochs 20 --run_name twenty

    \b
    Exit codes: 0 done · 1 internal error · 2 usage, configuration or data · 3 training failed
                4 environment · 5 budget reached · 130/143 interrupted
    """
    chosen = config_file or file
    if chosen is None or (config_file and file):
        raise click.UsageError("name one configuration file: reinforge finetune FILE")

    def run() -> Any:
        from reinforge.config.loader import load_config
        from reinforge.trainer.progress import SilentProgress, default_progress
        from reinforge.trainer.run import RunOptions, run_config

        loaded = load_config(chosen, overrides=_overrides(options))
        progress = SilentProgress() if as_json else default_progress()
        return run_config(loaded, RunOptions(run_name=run_name, progress=progress))

    run_and_exit(run, as_json=as_json, debug=debug, require_improvement=require_improvement)


FLAG_PATHS = {
    "dataset": "eval.general.dataset.file_path",
    "validation_interval": "finetuning.run_configuration.validation_interval",
    "max_minutes": "finetuning.limits.max_minutes",
    "max_tokens": "finetuning.limits.max_tokens",
}
"""Where a flag stands in the configuration; a flag is an override with a name of its own."""


def _overrides(options: dict[str, Any]) -> list[tuple[str, str]]:
    flags = [(path, json.dumps(options[name])) for name, path in FLAG_PATHS.items() if options.get(name) is not None]
    return flags + [(path, value) for path, value in options["overrides"]]
