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
from reinforge.serving.version_folder import DEFAULT_SHARE, Event, Version, VersionFolder, VersionState

SHOWN = 10
"""Newest events of the log that are printed; --json has all."""
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
def command(
    name: str,
    add: str | None,
    data: str | None,
    card: str | None,
    promote: int | None,
    candidate: int | None,
    share: float,
    stop_candidate: bool,
    reason: str,
    versions_dir: str,
    output_dir: str,
    as_json: bool,
) -> None:
    """List the versions of a served model and the log of its changes, or change which ones are served.

    NAME is the name of a folder in --versions_dir. A server of the folder follows every change at once.

    \b
    Example:
      reinforge versions support --add last
      reinforge versions support --candidate 7 --share 0.2
      reinforge versions support --promote 7 --reason "better on refunds"
    """
    changes = [add, promote, candidate, stop_candidate or None]
    if sum(each is not None for each in changes) > 1:
        raise click.UsageError("--add, --promote, --candidate and --stop_candidate exclude each other")
    if add is not None:
        folder = _find_or_choose(name, Path(versions_dir))
        _add(folder, add, Path(output_dir), {"data": data, "card": card}, reason)
    else:
        folder = VersionFolder.find(name, Path(versions_dir))
    if promote is not None:
        folder.promote(promote, reason=reason)
    elif candidate is not None:
        folder.try_candidate(candidate, share, reason=reason)
    elif stop_candidate:
        folder.stop_candidate(reason=reason)
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


def _find_or_choose(name: str, versions_dir: Path) -> VersionFolder:
    try:
        return VersionFolder.find(name, versions_dir)
    except ConfigError:
        is_path = len(Path(name).parts) > 1 or name.startswith(("~", "."))
        return VersionFolder(Path(name) if is_path else versions_dir / name)


def _add(folder: VersionFolder, source: str, output_dir: Path, facts: dict[str, Any], reason: str) -> None:
    from reinforge.runs.saved_model import find_model
    from reinforge.serving.loading import read_run_settings

    found = find_model(source, output_dir, "--add")
    path = Path(found.path)
    if found.adapters or not path.is_dir():
        why = "has several adapters" if found.adapters else "is not a folder of this machine"
        raise ConfigError(Problem("--add", f"{found.path} {why}", "name a run or a folder with one model"))
    run = None if found.run is None else str(found.run.absolute())
    folder.add(path.absolute(), {"run": run, "settings": read_run_settings(found), **facts}, reason=reason)


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
