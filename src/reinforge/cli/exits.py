"""How a command exits: the summary of a run, the error message, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reinforge.cli.options import GroupedCommand, GroupedOption
from reinforge.cli.output import say, say_as_is, say_json, without_secrets
from reinforge.cli.process import leave
from reinforge.errors import ConfigError, Interrupted, OutOfMemory, ReinforgeError

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig
    from reinforge.runs.summary import RunSummary

T = TypeVar("T")
INTERNAL_ERROR = 1
NOT_PROMOTED = 3
INTERRUPTED = 130

DEBUG = GroupedOption(["--debug"], is_flag=True, help="Print the traceback if the command fails.")

AtEnd = Callable[["RunSummary"], list[str]]  # called with the summary of a run; returns further lines to print


def run_and_exit(
    run: Callable[[], RunSummary],
    *,
    as_json: bool = False,
    require_improvement: bool = False,
    at_end: AtEnd = lambda summary: [],
) -> None:
    """Runs something and prints its summary.

    Args:
        require_improvement: Exit with code 3 if the model was not promoted.
        at_end: Returns lines to print after the summary.
    """
    from reinforge.runs.summary import SCREEN_ROWS

    summary = run()
    added = at_end(summary)
    if as_json:
        say_json(without_secrets({**summary.as_dict(), "folder": str(summary.folder)}))
    else:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        for line in summary.closing_lines(is_terminal and not os.environ.get("NO_COLOR"), SCREEN_ROWS):
            say_as_is(line)
    for line in added:
        say(line, err=as_json)
    if require_improvement and not summary.promoted:
        raise SystemExit(NOT_PROMOTED)


@contextmanager
def exit_on_error(*, as_json: bool, debug: bool) -> Iterator[None]:
    try:
        yield
    except ReinforgeError as error:
        _exit(error, error.exit_code, as_json, debug)
    except (click.ClickException, click.Abort, BrokenPipeError):
        raise
    except MemoryError as error:
        _exit(OutOfMemory(f"out of memory: {error or 'the machine has no memory left'}"), 4, as_json, debug)
    except Exception as error:  # noqa: BLE001  the last handler: whatever arrives here is a bug of reinforge
        _exit(error, INTERNAL_ERROR, as_json, debug)


def load_file(file: Path | None, overrides: Sequence[tuple[str, str]], *, as_json: bool) -> LoadedConfig:
    """Returns a configuration with all its problems; prints which environment variables it sends where."""
    from reinforge.config.loader import load_config
    from reinforge.trainer.setup.reach import list_reach

    loaded = load_config(file, overrides=overrides, keep_going=True)
    if not as_json:
        for name, text in list_reach(loaded).format_sent_variables():
            say(f"{name}: {text}", err=True)
    return loaded


def run_work(work: Coroutine[Any, Any, T], loaded: LoadedConfig) -> T:
    """Runs something that is not a run of its own, until it ends or a signal stops it."""
    from reinforge.trainer.options import LiveRun, RunOptions
    from reinforge.trainer.shutdown import run_interruptible

    live = LiveRun(blocked_s=loaded.config.finetuning.limits.episode_timeout_s)
    return run_interruptible(work, RunOptions(live=live))


class Command(GroupedCommand):
    """A command with `--debug`; an error in it exits with a message and an exit code."""

    def __init__(self, name: str | None, *, params: Sequence[click.Parameter], **attributes: Any):
        super().__init__(name, params=[*params, DEBUG], **attributes)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta["debug"] = debug = ctx.params.pop("debug")
        as_json = ctx.params.get("as_json", ctx.params.get("format") == "json")
        with exit_on_error(as_json=as_json, debug=debug):
            return super().invoke(ctx)


def _exit(error: Exception, code: int, as_json: bool, debug: bool) -> None:
    if debug:
        say("".join(traceback.format_exception(error)), err=True)
    if as_json:
        problems = [vars(p) for p in error.problems] if isinstance(error, ConfigError) else []
        say_json(without_secrets({"error": str(error), "kind": type(error).__name__, "problems": problems}))
    elif isinstance(error, ReinforgeError):
        count = len(error.problems) if isinstance(error, ConfigError) else 1
        head = f"{count} problems:\n" if count > 1 else ""
        say(f"error: {head}{error}", err=True)
    else:
        fix = "this is a bug in reinforge; please report it, with `reinforge env` and the traceback that --debug prints"
        say(f"error: {type(error).__name__}: {error}\n    fix: {fix}", err=True)
    for note in getattr(error, "__notes__", []):
        say(note, err=True)
    if isinstance(error, Interrupted):  # all files are written; a thread that still loads a model would abort the exit
        leave(code, at_once=True)
    raise SystemExit(code)
