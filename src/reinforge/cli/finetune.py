"""`reinforge finetune FILE`: a whole run from a YAML file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from reinforge.cli.report import DEBUG, JSON, OVERRIDE, AtEnd, existing_file, guarded, run_and_exit

FLAG_PATHS = {
    "dataset": "eval.general.dataset.file_path",
    "endpoint": "finetuning.run_configuration.endpoint",
    "endpoint_timeout": "finetuning.run_configuration.endpoint_timeout",
    "result_json_path": "finetuning.run_configuration.result_json_path",
    "validation_dataset": "finetuning.run_configuration.validation_dataset",
    "validation_interval": "finetuning.run_configuration.validation_interval",
    "validation_config_file": "finetuning.run_configuration.validation_config_file",
    "max_minutes": "finetuning.limits.max_minutes",
    "max_tokens": "finetuning.limits.max_tokens",
}
"""Where a flag stands in the configuration; a flag is an override with a name of its own."""


def flag(name: str, **attributes: Any) -> Any:
    """Returns an option that is accepted in snake_case and in dash-case."""
    return click.option(*dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]), **attributes)


@click.command("finetune", context_settings={"show_default": True})
@click.argument("file", required=False, callback=existing_file)
@flag("config_file", callback=existing_file, help="The YAML file, as an option.")
@flag("dataset", help="Dataset file that replaces the one of the YAML file.")
@flag("result_json_path", help="JSONPath into the answer of a remote workflow.")
@flag("endpoint", help="URL of a remote workflow; not supported in this version.")
@flag("endpoint_timeout", type=int, help="Seconds to wait for a remote workflow.")
@OVERRIDE
@flag("validation_dataset", help="Dataset file to select and confirm on; all of the other is trained on.")
@flag("validation_interval", type=int, help="Epochs between validations.")
@flag("validation_config_file", help="Another YAML file: select and confirm on its eval section.")
@flag("run_name", help="Name of the run folder; default: made from the date.")
@flag("resume", metavar="RUN|last", help="Go on with a run that was stopped; FILE may be left out.")
@flag("allow_config_change", is_flag=True, help="With --resume: go on although the configuration changed.")
@flag("max_minutes", type=float, help="Stop after this many minutes (exit 5).")
@flag("max_tokens", type=int, help="Stop after this many sampled tokens (exit 5).")
@flag("smoke", is_flag=True, help="Run everything once and small: one epoch, two examples, one optimizer step.")
@flag("dry_run", is_flag=True, help="Check everything, write the resolved configuration, and run nothing.")
@flag("require_improvement", is_flag=True, help="Exit 3 unless promoted.")
@JSON
@DEBUG
def command(file: Path | None, **options: Any) -> None:
    """Train the model behind an agent, as a YAML file says.

    \b
    Example:
      reinforge finetune run.yml --dry_run
      reinforge finetune run.yml --smoke
      reinforge finetune --resume last
      reinforge finetune run.yml -o finetuning.num_epochs 20 --run_name twenty

    \b
    Exit codes: 0 done · 1 internal error · 2 usage, configuration or data · 3 training failed
                4 environment · 5 budget reached · 130/143 interrupted
    """
    train(file, **options)


def train(
    file: Path | None,
    config_file: Path | None,
    as_json: bool,
    debug: bool,
    smoke: bool,
    dry_run: bool,
    require_improvement: bool,
    run_name: str | None,
    resume: str | None,
    allow_config_change: bool,
    at_end: AtEnd = lambda summary: [],
    **options: Any,
) -> None:
    """Does what the command says, with its options; then `at_end`, whose lines follow the closing lines."""
    chosen = config_file or file
    if (chosen is None and resume is None) or (config_file and file):
        raise click.UsageError("name one configuration file: reinforge finetune FILE")
    if resume is not None and (smoke or dry_run or run_name is not None):
        raise click.UsageError("--resume goes on with a run as it is: leave --smoke, --dry_run and --run_name out")
    if resume is None and allow_config_change:
        raise click.UsageError("--allow_config_change belongs to --resume")
    if dry_run and smoke:
        raise click.UsageError("--dry_run runs nothing and --smoke runs everything once; give one of them")
    overrides = _overrides(options)
    if dry_run and chosen is not None:
        _write_resolved(chosen, overrides, run_name, as_json=as_json, debug=debug)
        return

    def run() -> Any:
        from reinforge.config.loader import load_config
        from reinforge.runs.progress import SilentProgress, default_progress
        from reinforge.trainer.run import RunOptions, run_config

        progress = SilentProgress() if as_json else default_progress()
        options = RunOptions(run_name, progress, smoke=smoke, allow_config_change=allow_config_change)
        loaded = load_config(chosen, overrides=overrides) if chosen is not None else None
        if resume is not None:
            options.resume, loaded = find_begun(resume, loaded, overrides)
        assert loaded is not None
        return run_config(loaded, options)

    run_and_exit(run, as_json=as_json, debug=debug, require_improvement=require_improvement, at_end=at_end)


def find_begun(resume: str, loaded: Any, overrides: list[tuple[str, str]]) -> tuple[Path, Any]:
    """Returns the folder of a run that was begun before, and its configuration: the one given, or its own."""
    from reinforge.config.schema import FinetuneConfig
    from reinforge.trainer.resume import find_run, load_run_config

    given = [value for path, value in overrides if path == "finetuning.output_dir"]
    default = loaded.config.finetuning.output_dir if loaded is not None else FinetuneConfig().output_dir
    folder = find_run(resume, Path(given[-1]) if given else Path(default))
    return folder, loaded if loaded is not None else load_run_config(folder, overrides)


def _write_resolved(
    file: Path, overrides: list[tuple[str, str]], run_name: str | None, *, as_json: bool, debug: bool
) -> None:
    with guarded(as_json=as_json, debug=debug):
        from reinforge.config.loader import load_config
        from reinforge.trainer.run import RunOptions
        from reinforge.trainer.setup.check import dry_run

        written = asyncio.run(dry_run(load_config(file, overrides=overrides), RunOptions(run_name=run_name)))
        said = json.dumps({"ok": True, "config": str(written)}) if as_json else f"{file} is valid; wrote {written}"
        click.echo(said)


def _overrides(options: dict[str, Any]) -> list[tuple[str, str]]:
    flags = [(path, json.dumps(options[name])) for name, path in FLAG_PATHS.items() if options.get(name) is not None]
    return flags + [(path, value) for path, value in options["overrides"]]
