"""`reinforge runs`: lists, shows, compares, verifies and removes runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reinforge.cli.exits import Command, run_and_exit
from reinforge.cli.open_group import OpenGroup
from reinforge.cli.options import JSON, OUTPUT_DIR, GroupedOption, option
from reinforge.cli.output import say, say_json, say_table
from reinforge.cli.runs_compare import compare_command
from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.files import to_json
from reinforge.runs import run_folder
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.removal import ensure_removable, find_partial_removals, remove_run
from reinforge.runs.run_folder import RunOverview, RunRecord, find_run, format_local_time, format_size, read_overview
from reinforge.runs.summary import RunSummary, summarize_killed_run

if TYPE_CHECKING:
    from reinforge.runs.journal.verify import Verification

DAMAGE = 4
RESTART = "the run restarts from the beginning: no usable checkpoint is left"


@click.group("runs", cls=OpenGroup, around=("fetch", "reinforge.trackers.fetch_command:command"))
def command() -> None:
    """List runs, show what happened to one, compare two, verify a folder, fetch a copy, or remove one.

    \b
    Example:
      reinforge runs list
      reinforge runs show last
    """


command.add_command(compare_command)


@command.command("verdict", cls=Command, short_help="Judge a run that stopped before its verdict.")
@click.argument("run_name", metavar="RUN|last")
@option("project_root", metavar="FOLDER", help="Of a run that was not made here: its Python files, which you trust.")
@OUTPUT_DIR
@JSON
def verdict_command(run_name: str, project_root: str | None, output_dir: str, as_json: bool) -> None:
    """Judge a run that stopped before its verdict, without training any further.

    The base model and the best checkpoint so far run on the held-out examples, as at the end of a run. The run is then
    complete; -o finetuning.num_epochs N with finetune --resume adds epochs to it.

    \b
    Example:
      reinforge runs verdict last
    """

    def judge() -> RunSummary:
        from reinforge.runs.progress import open_progress
        from reinforge.trainer.options import RunOptions
        from reinforge.trainer.resume import load_for_verdict
        from reinforge.trainer.run import run_config

        folder = find_run(run_name, Path(output_dir))
        loaded = load_for_verdict(folder, Path(project_root) if project_root else None)
        with open_progress(silent=as_json) as progress:
            return run_config(loaded, RunOptions(progress=progress, resume=folder, judge_only=True))

    run_and_exit(judge, as_json=as_json)


@command.command("list", cls=Command)
@OUTPUT_DIR
@JSON
def list_command(output_dir: str, as_json: bool) -> None:
    """List the runs in a folder, the newest last.

    \b
    Status: running · interrupted (its process was killed) · stopped (by a limit or a signal)
            failed · completed · damaged (its journal cannot be read)

    \b
    Example:
      reinforge runs list
      reinforge runs list --output_dir runs --json
    """
    folder = Path(output_dir)
    runs, leftovers = run_folder.read_runs(folder), find_partial_removals(folder)
    if as_json:
        _print_json({"runs": [run.as_dict() for run in runs], "partially_removed": [str(path) for path in leftovers]})
        return
    if not runs:
        why = "" if folder.expanduser().is_dir() else ": the folder does not exist"
        say(f"no runs in {folder}{why}")
    else:
        header = ("name", "status", "epochs", "reward", "started", "size")
        say_table([header, *(_build_row(run) for run in runs)])
    for run in runs:
        if run.status == "damaged":
            say(f"{run.folder.name} is damaged: {run.reason}\n    details: reinforge runs verify {run.folder}")
    for path in leftovers:
        say(f"{path.name} is a run whose removal was interrupted\n    fix: reinforge runs rm {path}")
    last = runs[-1] if runs else None
    if last is not None and last.resume_command:
        say(f"resume {last.folder.name} with: {last.resume_command}")


def _build_row(run: RunOverview) -> tuple[str, ...]:
    return (
        run.folder.name,
        run.status,
        run.epochs if run.record is not None else "",
        _format_reward(run),
        format_local_time(run.started_s),
        format_size(run.num_bytes),
    )


def _format_reward(run: RunOverview) -> str:
    if run.summary is not None and run.summary.smoke and not run.summary.is_incomplete:
        return "smoke test passed"
    if run.summary is not None and run.summary.improvement is not None:
        verdict = {True: "promoted", False: "not promoted", None: "no verdict"}[run.summary.promoted]
        return f"{run.summary.improvement}, {verdict}"
    first, last = run.rewards
    return " -> ".join(f"{value:.3f}" for value in (first, last) if value is not None)


@command.command("show", cls=Command, short_help="Show what happened to a run, and how to resume it.")
@click.argument("run", metavar="RUN|last")
@option(
    "episode",
    metavar="N|KEY",
    help="Show one episode, by its key or by its number (from 0, in the order in which they ended).",
)
@option("phase", help="With --episode N: count only the episodes of this phase, for example collect or validate.")
@option("epoch", type=int, help="With --episode N: count only the episodes of this epoch; -1 is the baseline.")
@OUTPUT_DIR
@JSON
def show_command(
    run: str, episode: str | None, phase: str | None, epoch: int | None, output_dir: str, as_json: bool
) -> None:
    """Show what happened to a run: sessions, epochs, validations, verdict, checkpoints, and how to resume it.

    \b
    Example:
      reinforge runs show last
      reinforge runs show last --episode 0 --phase collect --epoch 3
      reinforge runs show 20260101-120000-ab12 --episode collect/3/0/17/2
    """
    if episode is None and (phase is not None or epoch is not None):
        raise click.UsageError("--phase and --epoch need --episode N")
    if episode is not None and not episode.isdecimal() and (phase is not None or epoch is not None):
        raise click.UsageError("a key already names its phase and epoch: leave out --phase and --epoch")
    from reinforge.runs.episodes import find_episode, format_episode

    folder = find_run(run, Path(output_dir))
    if episode is not None:
        found = find_episode(folder, episode, phase, epoch)
        if as_json:
            _print_json({"key": found.key, **found.data})
            return
        for line in format_episode(found):
            say(line)
        return
    overview = read_overview(folder)
    if overview.record is None:
        raise StorageError(f"{overview.reason}\n    details: reinforge runs verify {folder}")
    if as_json:
        _print_json(_describe(overview, overview.record))
        return
    _print_run(overview, overview.record)


def _describe(run: RunOverview, record: RunRecord) -> dict[str, Any]:
    data = record.as_dict()
    sessions = [
        {**row, "started": run_folder.format_utc(row["started_s"]), "ended_at": run_folder.format_utc(row["ended_s"])}
        for row in data["sessions"]
    ]
    summary = run.summary.as_dict() if run.summary is not None else None
    shown = {**data, "sessions": sessions, "checkpoints": _checkpoints(run, record), "summary": summary}
    return {**run.as_dict(), **shown}


def _print_run(run: RunOverview, record: RunRecord) -> None:
    from reinforge.runs.history import build_timeline

    head = run.summary.headline() if run.summary is not None else run.status
    say(f"{run.folder.name} {head}" + (f" ({run.owner})" if run.owner else ""))
    if run.summary is not None:
        for name, text in run.summary.facts():
            if name != "resume":  # the last line says it
                say(f"  {name:<12}{text}")
    else:
        say(f"  {'reason':<12}{run.reason}" if run.reason else f"  {'folder':<12}{run.folder}")
        say(f"  {'epochs':<12}{run.epochs}")
        say(f"  {'reward':<12}{_format_reward(run) or 'unknown: no validation has finished'}")
        so_far = summarize_killed_run(run.folder, record.validations, run_folder.read_config(run.folder))
        say(f"  {'best':<12}{so_far.describe_best()}")
    say("\nwhat happened")
    for at_s, text in build_timeline(record, is_running=run.owner is not None) or [(None, "nothing yet")]:
        say(f"  {format_local_time(at_s):<19}  {text}")
    say("\ncheckpoints")
    checkpoints = _checkpoints(run, record)
    for row in checkpoints:
        say(f"  {row['name']}  {', '.join(row['roles']) or 'kept'}, {format_size(row['num_bytes'])}")
    if not checkpoints:
        say("  none: the backend does not save its weights, or the run stopped before its first checkpoint")
    if run.resume_command:
        point = run_folder.find_resume_point(run.folder, record, lambda name: (run.folder / name).is_dir())
        say(f"\nthe run resumes {point}" if point is not None else f"\n{RESTART}")
        say(f"resume with: {run.resume_command}")


def _checkpoints(run: RunOverview, record: RunRecord) -> list[dict[str, Any]]:
    names = Checkpoints(run.folder).names()
    base = record.validations[0].checkpoint if record.validations else None
    best = run.summary.checkpoint if run.summary is not None else None
    versions = {row.checkpoint: row.version for row in record.versions}
    roles = {"base": base, "best": best, "newest": names[-1] if names else None}
    return [
        {
            "name": name,
            "version": versions.get(name),
            "roles": [role for role, named in roles.items() if named == name],
            "num_bytes": run_folder.measure_size(run.folder / name),
        }
        for name in names
    ]


@command.command("transcripts", cls=Command, short_help="Print the dialogues of a multi-agent run.")
@click.argument("run", metavar="RUN|last")
@option(
    "phase",
    type=click.Choice(["collect", "validate", "confirm_base", "confirm_tuned", "confirm_reference"]),
    default="collect",
    show_default=True,
    help="Phase of the episodes.",
)
@option("epoch", type=int, help="Only this epoch; -1 is the baseline, with --phase validate.")
@option("limit", metavar="N", type=click.IntRange(min=1), help="Print at most N dialogues; default: all.")
@option("format", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True, help="Output format.")
@OUTPUT_DIR
def transcripts_command(
    run: str, phase: str, epoch: int | None, limit: int | None, format: str, output_dir: str
) -> None:
    """Print the dialogues of a multi-agent run: messages, decision and each agent's reward; trees as trees.

    \b
    Example:
      reinforge runs transcripts last --epoch 3
      reinforge runs transcripts last --phase validate --epoch -1 --limit 2
    """
    from reinforge.runs.transcripts import format_transcripts, read_transcripts

    folder = find_run(run, Path(output_dir))
    found = read_transcripts(folder, phase, epoch, limit)
    if not found["transcripts"]:
        which = f"{found['num_episodes']:,} episodes of phase {phase}{'' if epoch is None else f' and epoch {epoch}'}"
        message = f"{folder} has {which}, but none is a dialogue"
        raise ConfigError(Problem("", message, f"list the stages of the run with: reinforge runs show {folder}"))
    say(format_transcripts(found, format).rstrip())


@command.command("verify", cls=Command, short_help="Check a run folder for damage. Changes nothing.")
@click.argument("run", metavar="RUN|last")
@OUTPUT_DIR
@JSON
def verify_command(run: str, output_dir: str, as_json: bool) -> None:
    """Verify a run folder: database, checkpoints, snapshots, exports, leftovers. Changes nothing.

    Exits with 4 if something is damaged, else with 0. Files left behind by a killed process are not damage.

    \b
    Example:
      reinforge runs verify last
    """
    from reinforge.runs.journal.verify import verify_run

    found = verify_run(find_run(run, Path(output_dir)))
    if as_json:
        _print_json(found.as_dict())
    else:
        _print_findings(found)
    if not found.is_sound:
        raise SystemExit(DAMAGE)


def _print_findings(found: Verification) -> None:
    run = found.overview
    for name, text in found.checked.items():
        say(f"  {name:<12}{text}")
    if run.owner is not None:
        say(f"  {'running':<12}{run.owner} is using the run; files that it may change were not checked")
    damages = [finding for finding in found.findings if finding.is_damage]
    for title, findings in (
        ("damaged", damages),
        ("leftovers", [finding for finding in found.findings if not finding.is_damage]),
    ):
        if findings:
            say(f"\n{title}")
        for finding in findings:
            say(f"  {finding.what}: {finding.problem}\n      {'fix' if finding.is_damage else 'note'}: {finding.fix}")
    if found.findings:
        say("")
    many = f"{len(damages)} problem{'s' if len(damages) > 1 else ''}"
    say(f"{run.folder} is sound" if found.is_sound else f"{run.folder}: {many}")
    if run.resume_command:
        say(f"the run resumes {found.resume}" if found.resume is not None else RESTART)
        say(f"resume with: {run.resume_command}")


@command.command("tag", cls=Command, short_help="Set the tags and the note of a run.")
@click.argument("run", metavar="RUN|last")
@click.argument("tags", nargs=-1, metavar="[TAG]...")
@click.option("--note", cls=GroupedOption, help="A sentence about the run; an empty one removes the note.")
@OUTPUT_DIR
@JSON
def tag_command(run: str, tags: tuple[str, ...], note: str | None, output_dir: str, as_json: bool) -> None:
    """Set the tags and the note of a run, or print them. `reinforge view` shows them and searches in them.

    Tags replace the run's tags, a note replaces its note; `-` alone removes all tags.

    \b
    Example:
      reinforge runs tag last baseline lr-sweep
      reinforge runs tag last --note "diverged after epoch 4"
      reinforge runs tag last -
    """
    folder = find_run(run, Path(output_dir))
    if tags or note is not None:
        old_tags, old_note = run_folder.read_labels(folder)
        words = [] if tags == ("-",) else tags or old_tags
        run_folder.write_labels(folder, words, old_note if note is None else note)
    shown, text = run_folder.read_labels(folder)
    if as_json:
        _print_json({"tags": shown, "note": text})
    else:
        say(f"{folder.name}: {', '.join(shown) or 'no tags'}{f'; {text}' if text else ''}")


@command.command("rm", cls=Command)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", cls=GroupedOption, is_flag=True, help="Do not ask for confirmation.")
@OUTPUT_DIR
@JSON
def rm_command(runs: tuple[str, ...], yes: bool, output_dir: str, as_json: bool) -> None:
    """Remove run folders with everything in them. A run in progress is not removed.

    \b
    Example:
      reinforge runs rm 20260101-120000-ab12
      reinforge runs rm one two --yes
    """
    folders = _find_folders(runs, Path(output_dir))
    for folder in folders:
        ensure_removable(folder)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise ConfigError(Problem("", "nothing was removed: there is no terminal to confirm on", "pass --yes"))
        _confirm(folders)
    for folder in folders:
        remove_run(folder)
        if not as_json:
            say(f"removed {folder}")
    if as_json:
        _print_json({"removed": [str(folder) for folder in folders]})


def _find_folders(runs: tuple[str, ...], output_dir: Path) -> list[Path]:
    """Returns the folders to remove, each once, including runs whose removal was interrupted; all in `output_dir`."""
    leftovers = {name: path for path in find_partial_removals(output_dir) for name in (path.name, str(path))}
    folders = [leftovers[run] if run in leftovers else find_run(run, output_dir) for run in runs]
    base = output_dir.expanduser().resolve()
    for folder in folders:
        parent = folder.parent.resolve()
        if parent != base or not folder.name:
            message = f"{folder} is not a run in the output folder {output_dir}; nothing was removed"
            raise ConfigError(Problem("", message, f"to remove a run there, name its folder: --output_dir {parent}"))
    return list({folder.absolute(): folder for folder in folders}.values())


def _confirm(folders: list[Path]) -> None:
    for folder in folders:
        overview = read_overview(folder)
        can = ", resumable" if overview.resume_command else ""
        say(f"  {folder}  {overview.status}{can}, {format_size(run_folder.measure_size(folder))}")
    if not click.confirm(f"remove {'these runs' if len(folders) > 1 else 'this run'} permanently?"):
        say("nothing was removed")
        raise SystemExit(0)


def _print_json(value: Any) -> None:
    say_json(json.loads(to_json(value)))
