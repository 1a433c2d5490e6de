"""`reinforge versions NAME`: the versions of a served model, who changed them, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from reinforge.cli.exits import Command
from reinforge.cli.options import JSON, OUTPUT_DIR, option
from reinforge.cli.output import say, say_json, say_table
from reinforge.errors import ConfigError, Problem
from reinforge.serving.rollback_command import REASON, VERSIONS_DIR
from reinforge.serving.version_folder import DEFAULT_SHARE, Cause, Event, Version, VersionFolder, VersionState

SHOWN = 10  # newest changes that are printed
CHANGE = "Change"


@click.command("versions", cls=Command, context_settings={"show_default": True})
@click.argument("name", metavar="NAME|FOLDER")
@option("add", metavar="RUN|MODEL", group=CHANGE, help="Add a run's model, or a folder, as the next version.")
@option("data", metavar="TEXT", group=CHANGE, help="With --add: what it was trained on.")
@option("card", metavar="FILE", group=CHANGE, help="With --add: its model card.")
@option("promote", metavar="N", type=click.IntRange(1), group=CHANGE, help="Serve version N from now on.")
@option("candidate", metavar="N", type=click.IntRange(1), group=CHANGE, help="Give version N a share of conversations.")
@option(
    "share", type=click.FloatRange(0, 1, min_open=True), default=DEFAULT_SHARE, group=CHANGE, help="Of --candidate."
)
@option("stop_candidate", is_flag=True, group=CHANGE, help="Take the share from the candidate.")
@REASON
@VERSIONS_DIR
@OUTPUT_DIR
@JSON
def command(name: str, share: float, reason: str, versions_dir: str, as_json: bool, **options: Any) -> None:
    """List the versions of a served model and the log of its changes, or change which ones are served.

    NAME is the name of a folder in --versions_dir. A server of the folder follows every change at once.

    \b
    Example:
      reinforge versions support --add last
      reinforge versions support --candidate 7 --share 0.2
      reinforge versions support --promote 7 --reason "better on refunds"
    """
    add, promote, candidate, stops = (options[each] for each in ("add", "promote", "candidate", "stop_candidate"))
    if sum(each is not None for each in (add, promote, candidate, stops or None)) > 1:
        raise click.UsageError("--add, --promote, --candidate and --stop_candidate exclude each other")
    folder = VersionFolder.find(name, Path(versions_dir), creates=add is not None)
    cause = Cause(reason)
    if add is not None:
        add_model(folder, add, Path(options["output_dir"]), {each: options[each] for each in ("data", "card")}, cause)
    elif promote is not None:
        folder.promote(promote, cause)
    elif candidate is not None:
        folder.try_candidate(candidate, share, cause)
    elif stops:
        folder.stop_candidate(cause)
    state, log = folder.read(), folder.read_log()
    versions = [folder.read_version(number) for number in folder.numbers()]
    if as_json:
        say_json(_describe(folder, state, versions, log))
        return
    say_table([("version", "state", "created", "run", "data", "card"), *(_build_row(state, each) for each in versions)])
    say()
    for event in log[-SHOWN:]:
        why = f": {event.reason}" if event.reason else ""
        say(f"{event.at[:19]}  {event.action} {event.version} by {event.by}{why}")


def add_model(folder: VersionFolder, source: str, output_dir: Path, facts: dict[str, Any], cause: Cause) -> int:
    """Adds the model of a run, or a folder, as the next version; returns its number."""
    from reinforge.runs.saved_model import find_model
    from reinforge.serving.loading import read_run_settings

    found = find_model(source, output_dir, "--add")
    path = Path(found.path)
    if found.adapters or not path.is_dir():
        why = "has several adapters" if found.adapters else "is not a folder of this machine"
        raise ConfigError(Problem("--add", f"{found.path} {why}", "name a run or a folder with one model"))
    run = None if found.run is None else str(found.run.absolute())
    return folder.add(path.absolute(), {"run": run, "settings": read_run_settings(found), **facts}, cause)


def _describe(
    folder: VersionFolder, state: VersionState, versions: Sequence[Version], log: Sequence[Event]
) -> dict[str, Any]:
    served = {"promoted": state.promoted, "candidate": state.candidate, "share": state.share}
    rows = [{**asdict(each), "folder": str(folder.path(each.number))} for each in versions]
    return {"name": folder.name, **served, "versions": rows, "log": [asdict(each) for each in log]}


def _build_row(state: VersionState, version: Version) -> tuple[str, ...]:
    is_candidate = version.number == state.candidate
    shown = "promoted" if version.number == state.promoted else f"candidate ({state.share:.0%})" * is_candidate
    run = Path(version.run).name if version.run else ""
    return str(version.number), shown, version.created[:19], run, version.data or "", version.card or ""
