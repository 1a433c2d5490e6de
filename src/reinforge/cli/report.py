"""What every command that runs something does at its end: the closing lines, the errors, the exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from reinforge.errors import ConfigError, Interrupted, OutOfMemory, ReinforgeError
from reinforge.runs.summary import RunSummary

INTERNAL_ERROR = 1
NOT_PROMOTED = 3

OVERRIDE = click.option(
    "-o", "--override", "overrides", nargs=2, multiple=True, metavar="PATH VALUE", help="Set any key of the file."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Write the result as JSON on stdout.")
DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
"""Options that commands share."""


AtEnd = Callable[[RunSummary], list[str]]
"""Given a run's summary, does what a command adds to it and returns lines to show."""


def run_and_exit(
    run: Callable[[], RunSummary],
    *,
    as_json: bool = False,
    debug: bool = False,
    require_improvement: bool = False,
    at_end: AtEnd = lambda summary: [],
) -> RunSummary:
    """Runs something and returns its summary, or ends the process with the exit code that the failure has.

    Args:
        run: The work.
        as_json: Write the summary or the error as one JSON object on stdout.
        debug: Show the traceback of a failure.
        require_improvement: Exit 3 where the model was not promoted.
        at_end: What the command adds.
    """
    with guarded(as_json=as_json, debug=debug):
        summary = run()
        added = at_end(summary)
    if as_json:
        click.echo(json.dumps({**summary.as_dict(), "folder": str(summary.folder)}, ensure_ascii=False))
    else:
        for line in [*summary.closing_lines(color=sys.stdout.isatty()), *added]:
            click.echo(line)
    if require_improvement and not summary.promoted:
        raise SystemExit(NOT_PROMOTED)
    return summary


@contextmanager
def guarded(*, as_json: bool, debug: bool) -> Iterator[None]:
    """Says what went wrong and ends the process with the exit code that the failure has."""
    try:
        yield
    except ReinforgeError as error:
        _fail(error, error.exit_code, as_json, debug)
    except (click.ClickException, BrokenPipeError):
        raise
    except MemoryError as error:
        _fail(OutOfMemory(f"too little memory: {error or 'the machine has none left'}"), 4, as_json, debug)
    except Exception as error:  # noqa: BLE001  the last door: an error of ours, said as one
        _fail(error, INTERNAL_ERROR, as_json, debug)


def _fail(error: Exception, code: int, as_json: bool, debug: bool) -> None:
    """Says what went wrong and what to do, and ends the process."""
    if debug:
        traceback.print_exception(error)
    if as_json:
        problems = [vars(p) for p in error.problems] if isinstance(error, ConfigError) else []
        click.echo(json.dumps({"error": str(error), "kind": type(error).__name__, "problems": problems}))
    elif isinstance(error, ReinforgeError):
        count = len(error.problems) if isinstance(error, ConfigError) else 1
        head = f"{count} problems:\n" if count > 1 else ""
        click.echo(f"error: {head}{error}", err=True)
    else:
        text = f"error: {type(error).__name__}: {error}\n    fix: this is a fault of reinforge; --debug shows where"
        click.echo(text, err=True)
    for note in getattr(error, "__notes__", []):
        click.echo(note, err=True)
    if isinstance(error, Interrupted):  # everything is written; a thread that still loads a model would abort the exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def existing_file(context: click.Context, parameter: click.Parameter, value: str | None) -> Path | None:
    """Turns a file argument into a path; a file that is missing is a usage error."""
    if value is None:
        return None
    path = Path(value)
    if not path.is_file():
        raise click.BadParameter(f"there is no file {value}", context, parameter)
    return path
