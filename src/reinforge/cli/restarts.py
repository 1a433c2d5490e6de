"""`--restarts N`: a run whose process dies continues in another one, which a waiting process forks.

    reinforge finetune run.yml --restarts 20
        the waiting process: has imported what a run needs, forks, waits, forwards signals
            its child: the run; killed -> the next child resumes it, without importing anything again

A run is continued where another attempt may end otherwise: after a signal that it was not sent through the waiting
process (such as the kernel's, when memory is used up), after exit code 4, a failure of its environment, and where a
library has ended the process, as Ray does once its cluster is gone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reinforge.cli import process
from reinforge.cli.output import say
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.trainer.shutdown import SIGNALS

if TYPE_CHECKING:
    from reinforge.config.loaded_config import LoadedConfig
    from reinforge.trainer.options import RunOptions

MAX_PAUSE_S = 60.0
POLL_S = 0.1


class Keeper:
    """Runs something in a child, and again in another one if that died.

    Args:
        count_progress: Returns a number that grows as the run progresses.
        limit: How many attempts may fail one after the other without progress, after the first one.
    """

    def __init__(self, count_progress: Callable[[], int], limit: int):
        self.count_progress, self.limit = count_progress, limit
        self.child: int | None = None
        self.stopped_by: int | None = None

    def fork(self) -> bool:
        """Returns in each child, with whether it is the first; exits with the last one's exit code otherwise."""
        number, failures, progress = 0, 0, self.count_progress()
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        handlers = {each: signal.signal(each, self._forward) for each in heard}
        while True:
            gc.freeze()  # a collection in the child would copy all pages
            parent, (reader, writer) = os.getpid(), os.pipe()
            if (child := os.fork()) == 0:
                os.close(reader)
                process.parting = writer
                for each, handler in handlers.items():
                    signal.signal(each, handler)
                _follow(parent)
                return number == 0
            os.close(writer)
            self.child = child
            code, number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), number + 1
            self.child = None
            was_ended = _read(reader) == b"" and 0 <= code < 128  # by a library; above, by a second signal
            reached = self.count_progress()
            failures, progress = 1 if reached > progress else failures + 1, reached
            if self.stopped_by is not None or (code >= 0 and not was_ended and code != BackendError.exit_code):
                break
            why = "failed because of its environment"
            if code < 0:
                why = f"was killed by {signal.Signals(-code).name}"
            elif was_ended:
                why = f"was stopped by a library, with exit code {code}"
            if failures > self.limit:
                say(f"the run {why}, {failures} times without progress; it is not continued", err=True)
                break
            pause_s = min(MAX_PAUSE_S, 2.0 ** min(failures - 2, 6)) if failures > 1 else 0.0
            when = f" in {pause_s:g} s, attempt {failures} of {self.limit} without progress" if failures > 1 else ""
            say(f"the run {why}; it continues{when}", err=True)
            if not self._pause(pause_s):
                break
        raise SystemExit(code if code >= 0 else 128 - code)

    def _forward(self, number: int, frame: Any) -> None:
        self.stopped_by = number
        if self.child is not None:
            os.kill(self.child, number)

    def _pause(self, seconds: float) -> bool:
        """Returns False if a signal ended the pause."""
        end = time.monotonic() + seconds
        while self.stopped_by is None and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.stopped_by is None


def _read(pipe: int) -> bytes:
    """Returns what a pipe has, and closes it; what the child has left behind may still have its other end."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, 1)
    except BlockingIOError:
        return b""
    finally:
        os.close(pipe)


def _follow(parent: int) -> None:
    """Leaves the terminal's foreground, whose signals the parent forwards; and stops if the parent dies (Linux)."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        from reinforge.rollout.workflows.supervisor import SET_PARENT_DEATH_SIGNAL

        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def continue_in_child(options: RunOptions, loaded: LoadedConfig, limit: int) -> None:
    """Returns in each process that begins or resumes a run, with its options; exits in the one that waits for them."""
    from reinforge.adapters.launchers import find_launcher
    from reinforge.runs.journal.reader import JOURNAL, JournalReader

    if not hasattr(os, "fork"):
        raise ConfigError(Problem("--restarts", "this system cannot fork processes", "start again with --resume"))
    if find_launcher() is not None:
        message = "the processes of torchrun end together, so none of them can continue"
        raise ConfigError(Problem("--restarts", message, "start torchrun again with --resume, or use Ray"))
    folder = options.resume or options.choose_folder(loaded.config.finetuning)
    options.run_name = folder.name

    def has_begun() -> bool:
        return (folder / JOURNAL).is_file()

    def count_progress() -> int:
        reader = JournalReader(folder)
        return reader.count_episodes() + len(reader.policy_versions()) if has_begun() else 0

    adapter = loaded.config.trainer_adapters.get(loaded.config.finetuning.trainer_adapter or "")
    wait = adapter.prepare_restarts() if adapter is not None else None
    import_what_runs_need()
    if wait is not None:
        wait()
    if not Keeper(count_progress, limit).fork():
        options.resume = folder if has_begun() else None
        options.overwrite = not has_begun()  # a folder that was being made


def import_what_runs_need() -> None:
    """Imports what most runs do, so that a forked process has it; starts no thread and computes no tensor."""
    if sys.platform != "linux":  # forking such a process is not safe elsewhere
        return
    from reinforge.registry import REGISTRY

    for name in ("engine.preload", "evaluation.datasets", "trainer.run"):
        importlib.import_module(f"reinforge.{name}")
    REGISTRY.components()
