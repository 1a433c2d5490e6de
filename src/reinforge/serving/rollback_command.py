"""`reinforge rollback NAME`: the version before the promoted one answers again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, option
from reinforge.cli.output import say, say_json
from reinforge.serving.version_folder import DEFAULT_FOLDER, Cause, VersionFolder

VERSIONS_DIR = option(
    "versions_dir", metavar="FOLDER", default=str(DEFAULT_FOLDER), help="Folder in which NAME is looked for."
)
REASON = option("reason", metavar="TEXT", default="", help="Why, for the log.")


@click.command("rollback", cls=Command, context_settings={"show_default": True})
@click.argument("name", metavar="NAME|FOLDER")
@option("to", metavar="N", type=click.IntRange(1), help="The version to promote; default: the one before.")
@REASON
@VERSIONS_DIR
@JSON
def command(name: str, to: int | None, reason: str, versions_dir: str, as_json: bool) -> None:
    """Promote the version that was promoted before the current one; a server of the folder follows at once.

    Calls in flight end with the version that they began with. A candidate loses its share.

    \b
    Example:
      reinforge rollback support
      reinforge rollback support --to 6 --reason "wrong refunds"
    """
    folder = VersionFolder.find(name, Path(versions_dir))
    before = folder.read().promoted
    state = folder.rollback(to, Cause(reason))
    if as_json:
        shown = {each: value for each, value in asdict(state).items() if each != "seed"}
        say_json({"name": folder.name, "before": before, **shown})
        return
    say(f"{folder.name} is version {state.promoted} now, after {before}.")
    if to is None:
        say(f"To undo this: reinforge rollback {name} --to {before}")
