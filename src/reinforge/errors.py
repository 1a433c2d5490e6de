"""Every error that reinforge raises on purpose, and the exit code that the command line gives it.

    ReinforgeError                        1   internal
    ├── ConfigError(ValueError)           2   usage, configuration or data; lists every problem at once
    ├── TrajectoryError(ValueError)       2   a trajectory, group or sample that contradicts itself
    ├── CaptureError                      1   a model call could not be recorded exactly
    ├── EvaluationError                   3   an evaluation produced nothing that can be trusted
    ├── JobFailed(RuntimeError)           3   a training job failed or learned nothing
    ├── EngineError                       3   the embedded model cannot do what was asked
    ├── BackendError                      4   a training or model service answered wrongly
    │   └── BackendUnavailable(ConnectionError)  4   it does not answer at all
    ├── StorageError(OSError)             4   the run folder cannot be read, written or locked
    ├── OutOfMemory(MemoryError)          4   the machine or the device has too little memory
    ├── BudgetReached                     5   a limit of time or tokens was reached
    └── Interrupted                 130/143   a signal stopped the run

To add one, subclass the nearest class above and keep its exit code unless the command line must tell it apart.
A failed *episode* is recorded data and never one of these; a failed *job* stops the run.
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class ReinforgeError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 1


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with what a user wrote, and where.

    Attributes:
        path: Where in the configuration, for example `finetuning.num_epochs`; empty for a whole file.
        message: What was found and what is allowed.
        fix: What to write instead, as one sentence; may be empty.
        location: `file:line:column` or `file:line`; may be empty for values that stand in no file.
    """

    path: str
    message: str
    fix: str = ""
    location: str = ""

    def __str__(self) -> str:
        head = " ".join(part for part in (self.location, self.path) if part)
        text = f"{head}: {self.message}" if head else self.message
        return f"{text}\n    fix: {self.fix}" if self.fix else text


class ConfigError(ReinforgeError, ValueError):
    """Usage, configuration or data that cannot work; raised before any work starts, with every problem at once."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Iterable[str | Problem]):
        if isinstance(problems, str | Problem):
            problems = [problems]
        self.problems = [p if isinstance(p, Problem) else Problem("", p) for p in problems]
        super().__init__("\n".join(str(problem) for problem in self.problems))


class TrajectoryError(ReinforgeError, ValueError):
    """A trajectory, group or sample that contradicts itself."""

    exit_code = 2


class CaptureError(ReinforgeError):
    """A model call could not be recorded exactly as it was sampled."""


class EvaluationError(ReinforgeError):
    """An evaluation produced nothing that can be trusted."""

    exit_code = 3


class JobFailed(ReinforgeError, RuntimeError):
    """A training job failed, or learned nothing and says why."""

    exit_code = 3


class EngineError(ReinforgeError):
    """The embedded model cannot do what was asked of it."""

    exit_code = 3


class BackendError(ReinforgeError):
    """A training or model service answered in a way that cannot be used."""

    exit_code = 4


class BackendUnavailable(BackendError, ConnectionError):
    """A training or model service does not answer."""


class StorageError(ReinforgeError, OSError):
    """The run folder cannot be read, written or locked."""

    exit_code = 4


class OutOfMemory(ReinforgeError, MemoryError):
    """The machine or the device has too little memory for what was asked."""

    exit_code = 4


class BudgetReached(ReinforgeError):
    """A limit of time or tokens was reached; what is done is kept."""

    exit_code = 5


class Interrupted(ReinforgeError):
    """A signal stopped the run; what is done is kept. The exit code is 128 plus the signal's number."""

    def __init__(self, signal_name: str, exit_code: int):
        super().__init__(f"stopped by {signal_name}")
        self.exit_code = exit_code


@contextmanager
def boundary(error: type[ReinforgeError], what: str) -> Iterator[None]:
    """Turns whatever the outside world raises into `error`, saying `what` was being done.

    Errors of ours pass through unchanged, so that the innermost description wins.
    """
    try:
        yield
    except ReinforgeError:
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause


NOT_THEIRS = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
"""How the file names of our own code, of Python and of what is installed begin."""


def describe_error(error: BaseException) -> str:
    """Returns what was raised and the line of a person's own code that it came from; errors of ours need none.

    Example: `1 / 0` in the fourth line of task.py gives `"ZeroDivisionError: division by zero (task.py:4)"`.
    """
    if isinstance(error, ReinforgeError):
        return f"{type(error).__name__}: {error}"
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [f" ({Path(file).name}:{line})" for file, line in steps if not file.startswith(NOT_THEIRS)]
    return f"{type(error).__name__}: {error}{theirs[-1] if theirs else ''}"


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns ', did you mean "nearest"?' for the nearest allowed word, or an empty string.

    Example: `did_you_mean("epcohs", ["epochs", "seed"])` -> `', did you mean "epochs"?'`.
    """
    nearest = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f', did you mean "{nearest[0]}"?' if nearest else ""
