"""`reinforge runs`: which runs there are, what happened to one, whether its folder is whole, and its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.chat import plain_text
from reinforge.cli.finetune import flag
from reinforge.cli.report import DEBUG, JSON, guarded

if TYPE_CHECKING:
    from reinforge.runs.run_folder import RunOverview, RunRecord
    from reinforge.runs.verify import Verification

DAMAGE = 4
OUTPUT_DIR = flag("output_dir", default="./.reinforge/runs", show_default=True, help="Folder of the run folders.")


@click.group("runs")
def command() -> None:
    """List runs, tell what happened to one, check its folder bit for bit, or remove it."""


@command.command("list")
@OUTPUT_DIR
@JSON
@DEBUG
def list_command(output_dir: str, as_json: bool, debug: bool) -> None:
    """List the runs of a folder, the one begun last at the end.

    \b
    Status: running · interrupted (its process is gone without a word) · stopped (a limit or a signal)
            failed · completed · damaged (its record cannot be read)

    \b
    Example:
      reinforge runs list
      reinforge runs list --output_dir runs --json
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.runs.run_folder import half_removed, read_runs

        folder = Path(output_dir)
        runs, rests = read_runs(folder), half_removed(folder)
        if as_json:
            _print_json({"runs": [run.as_dict() for run in runs], "half_removed": [str(path) for path in rests]})
            return
        if not runs:
            why = "" if folder.expanduser().is_dir() else ": there is no such folder"
            _say(f"no runs in {folder}{why}")
        else:
            header = ("name", "status", "epochs", "reward", "begun", "size")
            _print_table([header, *(_row(run) for run in runs)])
        for run in runs:
            if run.status == "damaged":
                _say(f"{run.folder.name} is damaged: {run.reason}\n    look: reinforge runs verify {run.folder}")
        for path in rests:
            _say(f"{path.name} is what is left of a run that was being removed\n    fix: reinforge runs rm {path}")
        last = runs[-1] if runs else None
        if last is not None and last.goes_on_with:
            _say(f"go on with {last.folder.name}: {last.goes_on_with}")


def _row(run: RunOverview) -> tuple[str, ...]:
    from reinforge.runs.run_folder import local_time, size_text

    done, planned = ("?" if count is None else str(count) for count in (run.epochs_done, run.num_epochs))
    epochs = f"{done} of {planned}" if run.record is not None else ""
    return run.folder.name, run.status, epochs, _reward(run), local_time(run.begun_s), size_text(run.num_bytes)


def _reward(run: RunOverview) -> str:
    """Returns the improvement on `confirm` where there was a verdict, else the rewards on `select`."""
    if run.summary is not None and run.summary.improvement is not None:
        verdict = {True: "promoted", False: "not promoted", None: "no verdict"}[run.summary.promoted]
        return f"{run.summary.improvement}, {verdict}"
    first, last = run.rewards
    return " -> ".join(f"{value:.3f}" for value in (first, last) if value is not None)


@command.command("show")
@click.argument("run", metavar="RUN|last")
@flag("episode", metavar="N|KEY", help="Show one conversation: its number from 0 as they ended, or its key.")
@flag("phase", help="With --episode N: count the episodes of this phase only, for example collect or validate.")
@flag("epoch", type=int, help="With --episode N: count the episodes of this epoch only; -1 is the baseline.")
@OUTPUT_DIR
@JSON
@DEBUG
def show_command(
    run: str, episode: str | None, phase: str | None, epoch: int | None, output_dir: str, as_json: bool, debug: bool
) -> None:
    """Tell what happened to a run: sessions, epochs, validations, verdict, checkpoints, and how it goes on.

    \b
    Example:
      reinforge runs show last
      reinforge runs show last --episode 0 --phase collect --epoch 3
      reinforge runs show 20260101-120000-ab12 --episode collect/3/0/17/2
    """
    if episode is None and (phase is not None or epoch is not None):
        raise click.UsageError("--phase and --epoch belong to --episode N")
    if episode is not None and not episode.isdecimal() and (phase is not None or epoch is not None):
        raise click.UsageError("a key names its phase and epoch itself: leave --phase and --epoch out")
    with guarded(as_json=as_json, debug=debug):
        from reinforge.errors import StorageError
        from reinforge.runs.episodes import episode_lines, find_episode
        from reinforge.runs.run_folder import read_overview
        from reinforge.trainer.resume import find_run

        folder = find_run(run, Path(output_dir))
        if episode is not None:
            found = find_episode(folder, episode, phase, epoch)
            if as_json:
                _print_json({"key": found.key, **found.data})
                return
            for line in episode_lines(found):
                _say(line)
            return
        overview = read_overview(folder)
        if overview.record is None:
            raise StorageError(f"{overview.reason}\n    look: reinforge runs verify {folder}")
        if as_json:
            _print_json(_shown(overview, overview.record))
            return
        _tell(overview, overview.record)


def _shown(run: RunOverview, record: RunRecord) -> dict[str, Any]:
    from dataclasses import asdict

    from reinforge.runs.run_folder import iso

    sessions = [{**row, "started": iso(row["started_s"]), "ended_at": iso(row["ended_s"])} for row in record.sessions]
    summary = run.summary.as_dict() if run.summary is not None else None
    shown = {**asdict(record), "sessions": sessions, "checkpoints": _checkpoints(run, record), "summary": summary}
    return {**run.as_dict(), **shown}


def _tell(run: RunOverview, record: RunRecord) -> None:
    from reinforge.runs.history import story
    from reinforge.runs.run_folder import local_time, resume_point, size_text

    head = run.summary.headline() if run.summary is not None else run.status
    _say(f"{run.folder.name} {head}" + (f" ({run.owner})" if run.owner else ""))
    if run.summary is not None:
        for name, text in run.summary.facts():
            _say(f"  {name:<12}{text}")
    else:
        _say(f"  {'reason':<12}{run.reason}" if run.reason else f"  {'folder':<12}{run.folder}")
        done, planned = ("?" if count is None else str(count) for count in (run.epochs_done, run.num_epochs))
        _say(f"  {'epochs':<12}{done} of {planned}")
        _say(f"  {'reward':<12}{_reward(run) or 'unknown: nothing was validated'}")
    _say("\nwhat happened")
    for at_s, text in story(record, is_running=run.owner is not None) or [(None, "nothing yet")]:
        _say(f"  {local_time(at_s):<19}  {text}")
    _say("\ncheckpoints")
    for row in _checkpoints(run, record):
        _say(f"  {row['name']}  {', '.join(row['roles']) or 'kept'}, {size_text(row['num_bytes'])}")
    if not _checkpoints(run, record):
        _say("  none: the backend keeps its weights to itself, or the run did not come that far")
    if run.goes_on_with:
        point = resume_point(run.folder, record, lambda name: (run.folder / name).is_dir())
        _say(f"\nit goes on {point}" if point is not None else "\nnothing durable is left of it: it begins again")
        _say(f"go on with: {run.goes_on_with}")


def _checkpoints(run: RunOverview, record: RunRecord) -> list[dict[str, Any]]:
    from reinforge.runs.checkpoints import Checkpoints
    from reinforge.runs.run_folder import num_bytes

    names = Checkpoints(run.folder).all()
    base = record.validations[0].get("checkpoint") if record.validations else None
    best = run.summary.checkpoint if run.summary is not None else None
    versions = {row["checkpoint"]: row["version"] for row in record.versions}
    roles = {"base": base, "best": best, "newest": names[-1] if names else None}
    return [
        {
            "name": name,
            "version": versions.get(name),
            "roles": [role for role, named in roles.items() if named == name],
            "num_bytes": num_bytes(run.folder / name),
        }
        for name in names
    ]


@command.command("transcripts")
@click.argument("run", metavar="RUN|last")
@flag(
    "phase",
    type=click.Choice(["collect", "validate", "confirm_base", "confirm_tuned"]),
    default="collect",
    show_default=True,
    help="Why they were run.",
)
@flag("epoch", type=int, help="Those of this epoch only; -1 is the baseline, with --phase validate.")
@flag("limit", metavar="N", type=click.IntRange(min=1), help="At most so many; all unless given.")
@flag("format", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True, help="What is printed.")
@OUTPUT_DIR
@DEBUG
def transcripts_command(
    run: str, phase: str, epoch: int | None, limit: int | None, format: str, output_dir: str, debug: bool
) -> None:
    """Print dialogues of several agents: who said what, what was decided, what each earned; trees as trees.

    \b
    Example:
      reinforge runs transcripts last --epoch 3
      reinforge runs transcripts last --phase validate --epoch -1 --limit 2
    """
    with guarded(as_json=format == "json", debug=debug):
        from reinforge.errors import ConfigError, Problem
        from reinforge.runs.transcripts import read_transcripts, transcripts_text
        from reinforge.trainer.resume import find_run

        folder = find_run(run, Path(output_dir))
        found = read_transcripts(folder, phase, epoch, limit)
        if not found["transcripts"]:
            which = (
                f"{found['num_episodes']:,} episodes of phase {phase}{'' if epoch is None else f' and epoch {epoch}'}"
            )
            message = f"{folder} has {which}, and none is a dialogue"
            raise ConfigError(Problem("", message, "reinforge runs show tells its stages, and shows any episode"))
        _say(transcripts_text(found, format).rstrip())


@command.command("verify")
@click.argument("run", metavar="RUN|last")
@OUTPUT_DIR
@JSON
@DEBUG
def verify_command(run: str, output_dir: str, as_json: bool, debug: bool) -> None:
    """Check a run folder bit for bit: database, checkpoints, snapshots, exports, rests. Changes nothing.

    Exit 0 if nothing is damaged, though a killed process may have left rests; 4 if something is.

    \b
    Example:
      reinforge runs verify last
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.runs.verify import verify_run
        from reinforge.trainer.resume import find_run

        found = verify_run(find_run(run, Path(output_dir)))
        if as_json:
            _print_json(found.as_dict())
        else:
            _tell_findings(found)
        if not found.is_sound:
            raise SystemExit(DAMAGE)


def _tell_findings(found: Verification) -> None:
    run = found.overview
    for name, text in found.checked.items():
        _say(f"  {name:<12}{text}")
    if run.owner is not None:
        _say(f"  {'running':<12}{run.owner} works on it; what that may change was not judged")
    damages = [finding for finding in found.findings if finding.is_damage]
    for title, findings in (
        ("damaged", damages),
        ("left over", [finding for finding in found.findings if not finding.is_damage]),
    ):
        if findings:
            _say(f"\n{title}")
        for finding in findings:
            _say(f"  {finding.what}: {finding.problem}\n      {'fix' if finding.is_damage else 'then'}: {finding.mend}")
    if found.findings:
        _say("")
    many = f"{len(damages)} thing{'s are' if len(damages) > 1 else ' is'} damaged"
    _say(f"{run.folder} is sound" if found.is_sound else f"{run.folder}: {many}")
    if run.goes_on_with:
        _say(f"it goes on {found.resume}" if found.resume is not None else "nothing durable is left: it begins again")
        _say(f"go on with: {run.goes_on_with}")


@command.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@OUTPUT_DIR
@JSON
@DEBUG
def rm_command(runs: tuple[str, ...], yes: bool, output_dir: str, as_json: bool, debug: bool) -> None:
    """Remove run folders with everything in them. One that a process works on is refused.

    \b
    Example:
      reinforge runs rm 20260101-120000-ab12
      reinforge runs rm one two --yes
    """
    with guarded(as_json=as_json, debug=debug):
        from reinforge.errors import ConfigError, Problem
        from reinforge.runs.run_folder import refuse_removal, remove_run

        folders = _to_remove(runs, Path(output_dir))
        for folder in folders:
            refuse_removal(folder)
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise ConfigError(Problem("", "nothing was removed: there is nobody to ask", "say --yes"))
            _ask(folders)
        for folder in folders:
            remove_run(folder)
            if not as_json:
                _say(f"removed {folder}")
        if as_json:
            _print_json({"removed": [str(folder) for folder in folders]})


def _to_remove(runs: tuple[str, ...], output_dir: Path) -> list[Path]:
    """Returns the folders that are meant, each once; a run whose removal was cut short counts as one."""
    from reinforge.runs.run_folder import half_removed
    from reinforge.trainer.resume import find_run

    rests = {name: path for path in half_removed(output_dir) for name in (path.name, str(path))}
    folders = [rests[run] if run in rests else find_run(run, output_dir) for run in runs]
    return list({folder.absolute(): folder for folder in folders}.values())


def _ask(folders: list[Path]) -> None:
    from reinforge.runs.run_folder import num_bytes, read_overview, size_text

    for folder in folders:
        overview = read_overview(folder)
        can = ", can go on" if overview.goes_on_with else ""
        _say(f"  {folder}  {overview.status}{can}, {size_text(num_bytes(folder))}")
    if not click.confirm(f"remove {'these' if len(folders) > 1 else 'it'} for good?"):
        _say("nothing was removed")
        raise SystemExit(0)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    rows = [tuple(map(plain_text, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(text: str) -> None:
    """Writes text that cannot steer a terminal: names, reasons and replies may hold anything."""
    click.echo(plain_text(text))


def _print_json(value: Any) -> None:
    from reinforge.files import to_json

    click.echo(json.dumps(json.loads(to_json(value))))
