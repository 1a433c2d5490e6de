"""`reinforge learn`: what a server with `--learn` has kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.finetune import train
from reinforge.cli.options import JSON, OUTPUT, option, parse_existing_file, parse_output_file
from reinforge.cli.output import say, say_json, without_secrets
from reinforge.serving.rollback_command import VERSIONS_DIR

USES = ("all", "sft", "kto", "dpo")
NICENESS = 10  # of a training, so that the server goes first


@click.group("learn")
def command() -> None:
    """Train on the chats that `reinforge serve --learn` keeps.

    \b
    Example:
      reinforge learn export .reinforge/serve --use kto --output rows.jsonl
    """


@command.command("export", cls=Command)
@click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path))
@option("output", metavar="FILE", required=True, callback=parse_output_file, group=OUTPUT, help="JSONL file to write.")
@option(
    "use",
    type=click.Choice(USES),
    default="all",
    help="all: every chat, with its ratings; sft: good replies and corrections; kto: replies with a thumb; dpo: "
    "corrections against the replies that they correct.",
)
@option(
    "version",
    metavar="NAME",
    help="Version that is trained on these rows; the server then lists it when a person's chats are deleted.",
)
@option("overwrite", is_flag=True, group=OUTPUT, help="Replace the output file.")
@JSON
def export_command(folder: Path, output: Path, use: str, version: str | None, overwrite: bool, as_json: bool) -> None:
    """Write the chats of a server as rows to train on.

    FOLDER is the --data_dir of the server, which may be running.

    \b
    Example:
      reinforge learn export .reinforge/serve --use kto --output rows.jsonl --version support@7
      reinforge finetune run.yml --dataset rows.jsonl
    """
    from reinforge.learning.export import export_rows
    from reinforge.learning.store import STORE

    if output.exists() and not overwrite:
        raise click.UsageError(f"{output} exists already; add --overwrite to replace it")
    if not (folder / STORE).is_file():
        raise click.UsageError(f"{folder} has no {STORE}: pass the --data_dir of a server that runs with --learn")
    report = export_rows(folder / STORE, output, use, version)
    if as_json:
        say_json(without_secrets(report.as_dict()))
        return
    for line in report.format_lines():
        say(line)
    say(f"next: reinforge data validate {output}")


@command.command("run", cls=Command, context_settings={"show_default": True})
@click.argument("name", metavar="NAME|FOLDER")
@option("learn", metavar="FILE", required=True, callback=parse_existing_file, help="The server's file, with `train:`.")
@option("data_dir", metavar="FOLDER", default=".reinforge/serve", help="The --data_dir of the server.")
@option(
    "retrain_without",
    metavar="USER",
    help="Begin with the newest version that was not trained on this user's chats, and leave them out.",
)
@option("rated", metavar="N", type=click.IntRange(min=0), default=0, help="Only if N rated chats are new.")
@VERSIONS_DIR
@JSON
def run_command(
    name: str,
    learn: Path,
    data_dir: str,
    retrain_without: str | None,
    rated: int,
    versions_dir: str,
    as_json: bool,
) -> None:
    """Train the promoted version on the rated chats of a server; what its gate promotes becomes the candidate.

    The run is one of `reinforge finetune`, with the file that `train.config` names, at a low priority. A server whose
    file has `train.when` starts this command by itself.

    \b
    Example:
      reinforge serve .reinforge/versions/support --learn learn.yml
      reinforge learn run support --learn learn.yml
      reinforge learn run support --learn learn.yml --retrain_without USER
    """
    from reinforge.learning.training import open_training, read_train_config
    from reinforge.serving.version_folder import VersionFolder

    config, folder = read_train_config(learn), VersionFolder.find(name, Path(versions_dir))
    with open_training(config, Path(data_dir), folder, rated=rated, without=retrain_without) as training:
        say(f"Training version {training.base} of {training.folder.name} on {training.data}.", err=as_json)
        if hasattr(os, "nice"):
            os.nice(NICENESS)
        data: dict[str, Any] = {"dataset": str(training.rows), "model": str(training.model)}
        data["overrides"] = training.overrides
        train(config.config, as_json, run_name=training.run_name, at_end=training.add_candidate, **data)
