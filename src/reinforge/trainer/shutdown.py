"""A thread that watches the event loop of a run: it passes on signals, and kills what does not stop.

    first signal                  the run's task is cancelled; the run writes a checkpoint and its files
    `STOP_S` later                the process exits, whatever an agent does; its last checkpoint is on disk already
    second signal                 the process exits at once
    an agent blocks the loop      it is interrupted after the time limit of an episode, which then has timed out
    it ignores signals            the run's own handlers are put back within a tick
    it holds Python's lock        `signal_observer.py`, a process of its own, kills the run in place of this thread

A Python signal handler runs on the main thread, between two steps of the interpreter, so code that blocks there would
delay it. This thread is told by `signal.set_wakeup_fd`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

from reinforge.errors import Interrupted, StorageError
from reinforge.rollout.isolation import processes
from reinforge.rollout.isolation.containment import SCOPE, BlockedTime, LoopBlocked, close_loop, create_loop, run_loop
from reinforge.rollout.isolation.processes import kill_descendants
from reinforge.runs.summary import RunSummary, describe_resume, load_summary
from reinforge.trainer.options import LiveRun, RunOptions

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that stop a run. Slurm can send SIGUSR1 some time before it kills a job (`sbatch --signal`)."""

INTERRUPT = getattr(signal, "SIGURG", None)
"""Sent to the main thread to interrupt an agent that blocks it; ignored by default, and rarely used."""

OBSERVER = Path(processes.__file__).with_name("signal_observer.py")
TICK_S = 0.25
STOP_S = 7.0  # seconds that a run has to stop; with `RECORD_S` it stays below the 10 s that are promised
REPEAT_S = 0.5
"""Seconds within which a signal is the same as the one before: who stops all processes of a job at once sends it to the
run and to what starts it and passes it on."""
SAVE_S = 120.0  # seconds that it has to stop while it writes a checkpoint
RECORD_S = 2.0  # seconds that recording the end of a run may take
MIN_BLOCKED_S = 1.0
"""Seconds for which any code may block the event loop: on a busy machine, that is not always its fault."""
BLOCKED_AT_STOP_S = 2.0  # seconds for which an agent may block the event loop of a run that stops


class ShutdownThread:
    """Watches a loop that runs on the main thread; on any other thread, which gets no signals, it does nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], live: LiveRun):
        self.loop, self.task, self.live = loop, task, live
        self.received: signal.Signals | None = None
        self._stopped_s = 0.0
        self._beat_s = self._seen_beat_s = time.monotonic()
        self._num_silent_ticks = 0
        self._handlers: dict[int, Any] = {}
        self._observer: subprocess.Popen[bytes] | None = None
        self._reader, self._writer = socket.socketpair()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for end in (self._reader, self._writer):
            end.setblocking(False)
        for number in SIGNALS:
            if number is signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                self._handlers[number] = signal.getsignal(number)
        if INTERRUPT is not None:
            self._handlers[INTERRUPT] = signal.getsignal(INTERRUPT)
        self._set_handlers()
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.loop.call_soon(self._beat, context=contextvars.Context())
        threading.Thread(target=self._watch, name="reinforge-guard", daemon=True).start()
        return self

    def _set_handlers(self) -> None:
        """Also in place of those that an agent, or a library in it, has set since."""
        for number in self._handlers:
            signal.signal(number, self._interrupt if number == INTERRUPT else self._handle)

    def __exit__(self, *exc_info: Any) -> None:
        self._ended.set()
        if self._observer is not None:
            self._observer.kill()
            self._observer.wait()
        if self._handlers:
            with contextlib.suppress(ValueError, OSError):  # an agent may have closed the descriptor of the earlier one
                signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for end in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                end.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Passes a signal on if an agent's own signal handlers have replaced the wakeup descriptor."""
        with contextlib.suppress(ValueError, OSError):
            if signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False) != self._writer.fileno():
                self._writer.send(bytes([number]))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs on the main thread, inside the code that blocks it."""
        if SCOPE.get() is None or self._num_silent_ticks == 0:  # the run's own code, or the loop runs again
            return
        blocked_s, self._num_silent_ticks = time.monotonic() - self._beat_s, 0
        BlockedTime.total_s += blocked_s
        raise LoopBlocked(
            f"blocked the event loop for {blocked_s:.0f} s: await slow work, or write a plain function instead of an "
            "async one"
        )

    def _beat(self) -> None:
        if self._ended.is_set():  # the loop may run on after the handlers are those of before
            return
        if threading.current_thread() is not threading.main_thread():  # `close_loop` runs what is left of it elsewhere
            return
        self._beat_s = time.monotonic()
        self._set_handlers()
        self.loop.call_later(TICK_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.is_set():
            for number in self._read():
                self._receive(number)
            self._check_loop()
            self._check_deadline()
            if self._observer is None and self.live.folder is not None and os.name != "nt":
                with contextlib.suppress(OSError):  # too many processes: this thread watches alone
                    self._observer = self._start_observer(self.live.folder)

    def _start_observer(self, folder: Path) -> subprocess.Popen[bytes]:
        numbers = ",".join(str(int(number)) for number in self._handlers if number != INTERRUPT)
        message = (
            f"a signal did not stop the run within {STOP_S:g} s, since an agent or a library holds Python's "
            f"interpreter lock, so the process was killed (`isolation: process` prevents that)\n"
            f"resume with: {describe_resume(folder)}"
        )
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(OBSERVER)),
                *(str(processes.__file__), str(os.getpid()), numbers, str(STOP_S), message),
            ],
            stdin=self._reader.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _read(self) -> bytes:
        """Returns the signals that have arrived, after a tick at the latest."""
        try:
            ready, _, _ = select.select([self._reader], [], [], TICK_S)
            return self._reader.recv(64) if ready else b""
        except (OSError, ValueError):  # closed: by us, or by an agent; the handlers still run
            self._ended.wait(TICK_S)
            return b""

    def _receive(self, number: int) -> None:
        if number not in SIGNALS:
            return
        if self.received is not None:
            if time.monotonic() - self._stopped_s >= REPEAT_S:
                self._end("a second signal")
            return
        self.received, self._stopped_s = signal.Signals(number), time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self.loop.call_soon_threadsafe(self.task.cancel, context=contextvars.Context())

    def _check_loop(self) -> None:
        """Interrupts an agent that blocks the loop for too long; counts ticks, since a process may be suspended."""
        if self._beat_s != self._seen_beat_s:
            self._seen_beat_s, self._num_silent_ticks = self._beat_s, 0
            return
        self._num_silent_ticks += 1
        limit_s = max(MIN_BLOCKED_S, self.live.blocked_s)
        if self.received is not None:
            limit_s = min(BLOCKED_AT_STOP_S, limit_s)
        if self._num_silent_ticks * TICK_S >= limit_s and INTERRUPT is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT)

    def _check_deadline(self) -> None:
        limit_s = SAVE_S if self.live.is_saving else STOP_S
        if self.received is not None and time.monotonic() - self._stopped_s >= limit_s:
            self._end(f"it did not stop within {limit_s:g} s")

    def _end(self, why: str) -> None:
        """Exits with the exit code of the first signal."""
        received = self.received or signal.SIGTERM
        told = [f"stopped by {received.name}; {why}, so the process exits"]
        if self.live.folder is not None:
            told.append(f"resume with: {describe_resume(self.live.folder)}")

        def record() -> None:
            with contextlib.suppress(Exception):  # such as a full disk: the process exits all the same
                told[:] = [self.live.record_end(told[0])]

        recorder = threading.Thread(target=record, name="reinforge-last-words", daemon=True)
        recorder.start()
        recorder.join(RECORD_S)
        with contextlib.suppress(OSError):
            os.write(2, "\n".join(["", f"error: {told[0]}", *told[1:], ""]).encode(errors="backslashreplace"))
        kill_descendants()
        os._exit(128 + received)


T = TypeVar("T")


def run_interruptible(work: Coroutine[Any, Any, T], options: RunOptions) -> T:
    """Runs `work` on its own event loop; a signal cancels it, and `ShutdownThread` kills what does not stop."""
    loop = create_loop()
    task = loop.create_task(work)
    with ShutdownThread(loop, task, options.live) as guard:
        try:
            return run_loop(loop, task)
        except asyncio.CancelledError:
            if guard.received is None:
                raise
            raise build_interruption(guard.received, options) from None
        finally:
            close_loop(loop)


def is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def build_interruption(received: signal.Signals, options: RunOptions) -> Interrupted:
    """Returns the error of a run that a signal stopped; says where its work is kept and how to resume it."""
    interrupted = Interrupted(received.name, 128 + received)
    if options.folder is not None:
        interrupted.add_note(describe_kept_work(options.folder, _read_summary(options.folder)))
    return interrupted


def _read_summary(folder: Path) -> RunSummary | None:
    try:
        return load_summary(folder)
    except StorageError:  # the run was stopped before it wrote one
        return None


def describe_kept_work(folder: Path, summary: RunSummary | None = None) -> str:
    """Returns where the work of an unfinished run is kept, its best checkpoint, and how to resume it."""
    lines = [f"saved in {folder}: what the run has done so far, and run.log"]
    if summary is not None and summary.best is not None and (summary.checkpoint or summary.status == "stopped"):
        lines.append(f"best so far: {summary.describe_best()}")
    if summary is not None and summary.promoted is not None:
        lines += [f"{name}: {text}" for name, text in summary.facts() if name in ("reward", "improvement", "promoted")]
    elif summary is not None and (command := summary.find_verdict_command()) is not None:
        lines.append(f"there is no verdict yet; take it with: {command}")
    elif summary is not None and summary.status == "stopped" and not summary.num_jobs:
        lines.append("there is no verdict: nothing is trained yet")
    if summary is None or summary.can_resume:
        lines.append(f"resume with: {describe_resume(folder)}")
    return "\n".join(lines)
