"""The errors that reinforge raises, and the exit code of the command line for each.

    ReinforgeError                        1   internal
    ├── ConfigError(ValueError)           2   wrong usage, configuration or data; lists every problem
    ├── TrajectoryError(ValueError)       2   a trajectory, group or sample is inconsistent
    ├── RecordError(ValueError)           2   a value cannot be written as JSON
    ├── CaptureError                      1   a model call could not be recorded exactly
    ├── EvaluationError                   3   an evaluation has no usable result
    ├── JobFailed(RuntimeError)           3   a training job failed or learned nothing
    ├── EngineError                       3   the embedded model failed
    │   └── MessagesRejected              3   the chat template rejects the messages, such as two of the user in a row
    ├── BackendError                      4   a training or model service sent an invalid response
    │   └── BackendUnavailable(ConnectionError)  4   it does not respond
    ├── StorageError(OSError)             4   the run folder cannot be read, written or locked
    ├── OutOfMemory(MemoryError)          4   the machine or the device ran out of memory
    ├── BudgetReached                     5   a time or token limit was reached
    │   └── GuardHalted                   5   a guard stopped the run, since training goes wrong; it can be resumed
    └── Interrupted                 130/143   a signal stopped the run

To add an error, subclass the nearest class above; give it its own exit code only if scripts must tell it apart. A
failed *episode* is data and never raises; a failed *job* stops the run.
"""

from __future__ import annotations

import difflib
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.safe_text import redact_secrets


class ReinforgeError(Exception):
    exit_code = 1
    can_resume = True  # false if the run would fail in the same way when it is resumed, so that no message offers that
    is_exhausted = False  # true if training only has nothing left to learn from: what it has learned can be judged


@dataclass(frozen=True)
class Problem:
    """One problem in the user's input, with its position."""

    path: str  # in the configuration, for example `finetuning.num_epochs`; empty for a whole file
    message: str
    fix: str = ""
    location: str = ""  # `file:line:column` or `file:line`; empty for values that are in no file

    def __str__(self) -> str:
        head = " ".join(part for part in (self.location, self.path) if part)
        text = f"{head}: {self.message}" if head else self.message
        return f"{text}\n    fix: {self.fix}" if self.fix else text


class ConfigError(ReinforgeError, ValueError):
    """Wrong usage, configuration or data; raised before work starts, with every problem."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Iterable[str | Problem]):
        if isinstance(problems, str | Problem):
            problems = [problems]
        self.problems = [p if isinstance(p, Problem) else Problem("", p) for p in problems]
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ChatTemplateError(ConfigError):
    """The model's chat template cannot write what a request asks for."""


class TrajectoryError(ReinforgeError, ValueError):
    exit_code = 2


class RecordError(ReinforgeError, ValueError):
    exit_code = 2


class CaptureError(ReinforgeError): ...


class EvaluationError(ReinforgeError):
    exit_code = 3


class JobFailed(ReinforgeError, RuntimeError):
    exit_code = 3


class EngineError(ReinforgeError):
    exit_code = 3


class MessagesRejected(EngineError): ...


class BackendError(ReinforgeError):
    exit_code = 4


class BackendUnavailable(BackendError, ConnectionError): ...


class StorageError(ReinforgeError, OSError):
    exit_code = 4


class OutOfMemory(ReinforgeError, MemoryError):
    exit_code = 4


class ContextOverflow(Exception):
    """A prompt is longer than the policy's context; the runner records the episode as `context_overflow`."""


class InvalidCall(TypeError):
    """An agent's model call has an unsupported argument; `param` is its path, such as `messages[2].content[0]`."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


class PolicyFailure(Exception):
    """Raise this in a workflow if the model's answer is unusable: an invalid action, a reply that cannot be parsed.

    The episode counts as a policy failure, and its reward is `finetuning.outcomes.policy_error`. The other evaluators
    score `output`.
    """

    def __init__(self, message: str, output: Any = None):
        super().__init__(message)
        self.output = output


class BudgetReached(ReinforgeError):
    exit_code = 5


class GuardHalted(BudgetReached): ...


class RunPaused(BudgetReached):
    """Whoever started the run paused it between two epochs: it has no verdict, and can be resumed."""


class Interrupted(ReinforgeError):
    """A signal stopped the run; the work so far is saved. The exit code is 128 plus the signal number."""

    def __init__(self, signal_name: str, exit_code: int):
        super().__init__(f"stopped by {signal_name}")
        self.exit_code = exit_code


@contextmanager
def boundary(error: type[ReinforgeError], what: str) -> Iterator[None]:
    """Turns any exception of other code into `error`; its message starts with `what`, such as "cannot read run.sqlite".

    A `ReinforgeError` passes through unchanged, so that the innermost message is kept.
    """
    try:
        yield
    except ReinforgeError:
        raise
    except Exception as cause:
        raise error(redact_secrets(f"{what}: {type(cause).__name__}: {show(cause)}")) from cause


def show(value: object, convert: Callable[[object], str] = str) -> str:
    """Returns the text of an object that an agent or an evaluator made, whatever its `__str__` or `__repr__` raises."""
    try:
        return convert(value)
    except BaseException as error:  # noqa: BLE001  SystemExit in the `__str__` of an output must not end the run
        return f"an object of type {type(value).__name__}, whose {convert.__name__}() raised {type(error).__name__}"


def is_interrupt(error: BaseException) -> bool:
    """Returns True for a Ctrl-C; a run has handlers of its own, so that there a KeyboardInterrupt is an agent's."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_USER_CODE = (str(Path(__file__).parent), *_INSTALLED, "<")
"""Prefixes of the file names of reinforge, of Python and of installed packages."""
TRACE_LINES = 3


def describe_error(error: BaseException) -> str:
    """Returns an error as text without secrets, with the last lines of the user's own code in its traceback.

    Example: `1 / 0` in the fourth line of task.py gives `"ZeroDivisionError: division by zero (task.py:4)"`; called
    from its ninth line, `(task.py:9 > task.py:4)`.
    """
    if issubclass(type(error), ReinforgeError):
        return redact_secrets(f"{type(error).__name__}: {show(error)}")
    steps = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [f"{Path(file).name}:{line}" for file, line in steps if not file.startswith(_NOT_USER_CODE)]
    trace = f" ({' > '.join([*dict.fromkeys(lines)][-TRACE_LINES:])})" if lines else ""
    return redact_secrets(f"{type(error).__name__}: {show(error)}{trace}")


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns ', did you mean "nearest"?' with the nearest allowed word, or an empty string if none is near.

    Example: `did_you_mean("epcohs", ["epochs", "seed"])` -> `', did you mean "epochs"?'`.
    """
    nearest = difflib.get_close_matches(word[:100], list(allowed), n=1, cutoff=0.6)
    return f', did you mean "{nearest[0]}"?' if nearest else ""
