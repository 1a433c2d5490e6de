"""Runs an agent's or an evaluator's coroutine so that it can fail only itself, not the run's event loop.

    raises anything, SystemExit and GeneratorExit too     the caller gets an exception
    ignores its cancellation                              abandoned after `GRACE_S`; the run continues without it
    cancels every task of the loop                        `RunTask` refuses for those of the run and of other episodes
    stops the loop, or raises SystemExit in a callback    `run_loop` starts the loop again
    blocks the loop                                       `trainer/shutdown.py` interrupts it with `LoopBlocked`

It shares the process, so it can still end it or close its files: `isolation: process` prevents that too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any, Generic, Literal, TypeVar

from reinforge.errors import StorageError, show

T = TypeVar("T")
logger = logging.getLogger(__name__)

Isolation = Literal["thread", "process"]
IMPORTED_FILES: set[str] = set()
"""The project's files that workers have imported; like `sys.modules`, which does not know them, for this process."""
GRACE_S = 1.0  # seconds that a cancelled coroutine gets to end
CLOSE_S = 5.0  # seconds that closing a loop may take
CLOSED_FILES = (
    "the run's own files were closed: an agent or an evaluator has closed file descriptors that are not its own "
    "(os.close, os.closerange)\n    fix: close only what that code has opened, or run it in a separate process with "
    "`isolation: process`"
)
ROUNDING_S = 1e-3  # seconds by which a timer may fire too early: it would otherwise be set again for no time at all


SCOPE: contextvars.ContextVar[ContainedTask[Any] | None] = contextvars.ContextVar("reinforge_scope", default=None)
"""The contained coroutine in whose tasks and callbacks the current code runs; None: code of the run itself."""


class TimedOut(TimeoutError):
    """A contained coroutine did not end in time."""


class Abandoned(TimedOut):
    """It did not end when it was cancelled either, so it still runs."""


class Blocked(TimedOut):
    """It blocked the event loop until it was interrupted; the message says for how long."""


class WorkerEnded(Exception):
    """A worker died, or sent something other than messages, before its job was done."""


class SharedWorkerEnded(WorkerEnded):
    """A worker with several jobs died, so which of them killed it is not known."""


class LoopBlocked(BaseException):
    """Raised inside code that blocks the event loop; not an `Exception`, which agents catch."""


class BlockedTime:
    """Seconds for which the event loop was blocked; the coroutines that only waited for it get them back."""

    total_s = 0.0


class RunTask(asyncio.Task[Any]):
    """A task that contained code can cancel only if that code created it, or if no other code needs it.

    Attributes:
        scope: The contained coroutine that the task belongs to; None: the run.
    """

    __slots__ = ("is_main", "scope")

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.scope: ContainedTask[Any] | None
        self.scope, self.is_main = SCOPE.get(), False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancels the task; returns False if the caller may not."""
        caller = SCOPE.get()
        # a library may cancel a background task that another episode started, such as that of a shared connection
        is_needed = self.scope is None or (self.is_main and self.scope is not caller)
        if caller is not None and is_needed:
            logger.warning("an agent or evaluator tried to cancel %s, which is not its own", self.get_name())
            return False
        return super().cancel(msg)


def create_loop() -> asyncio.AbstractEventLoop:
    """Returns a new event loop whose tasks contained code cannot cancel."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(lambda loop, work, **options: RunTask(work, loop=loop, **options))
    return loop


def run_loop(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """Runs a loop until a task is done and returns its result; starts the loop again if other code stops it."""
    while not task.done():
        try:
            loop.run_until_complete(task)
        except RuntimeError:
            if not task.done():
                if loop.is_closed():
                    raise
                logger.warning("an agent or evaluator stopped the event loop; it was restarted")
        except OSError as error:
            if task.done():
                break
            if error.errno != errno.EBADF:
                raise
            raise StorageError(CLOSED_FILES) from error
        except BaseException as error:  # noqa: BLE001  such as SystemExit in a callback; the task's own is raised below
            if not task.done():
                logger.warning("an agent or evaluator raised %r in a task of its own; the run continues", error)
    return task.result()


def close_loop(loop: asyncio.AbstractEventLoop) -> bool:
    """Cancels what still runs on a loop and closes it; returns False if that takes longer than `CLOSE_S`.

    This happens on a daemon thread: a task that ignores its cancellation, or a thread of the loop that never ends,
    keeps neither the caller nor the process from ending.
    """

    def close() -> None:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_S))
        for task in tasks:
            if not task.done():
                logger.warning("a task that an agent or evaluator has started does not finish: %s", task.get_name())
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # said already
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    def try_to_close() -> None:
        with contextlib.suppress(OSError, ValueError):  # its descriptors were closed by other code
            close()

    thread = threading.Thread(target=try_to_close, name="reinforge-close", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    return not thread.is_alive()


class Settled(Generic[T]):
    """How contained code has ended."""

    __slots__ = ("error", "result")

    def __init__(self) -> None:
        self.result: T | None = None
        self.error: BaseException | None = None

    def get(self) -> T:
        """Returns the result or raises the error, one that any caller may catch."""
        error = self.error
        if error is None:
            return self.result  # type: ignore[return-value]
        if isinstance(error, LoopBlocked):
            raise Blocked(str(error))
        if not isinstance(error, Exception | asyncio.CancelledError | SystemExit):
            raise RuntimeError(show(error, repr)).with_traceback(error.__traceback__)
        raise error


class TimeLimit:
    """The contained tasks that have the same time limit, with one timer for all of them.

    Attributes:
        context: The context variables of the code that sets the limit; it handles the ends of the tasks.
    """

    def __init__(self, timeout_s: float | None):
        self.context = contextvars.copy_context()
        self._timeout_s, self._loop = timeout_s, asyncio.get_running_loop()
        self._started_s: dict[ContainedTask[Any], float] = {}  # the oldest first
        self._late: set[ContainedTask[Any]] = set()
        self._cancelled: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def watch(self, task: ContainedTask[Any]) -> None:
        self._started_s[task] = self._read_clock()
        if self._timer is None:
            self._set_timer()

    def forget(self, task: ContainedTask[Any]) -> bool:
        """Stops counting a task's time; returns False if it was not counted."""
        found = task in self._late or self._started_s.pop(task, None) is not None
        self._late.discard(task)
        if not self._started_s:
            self._stop_timer()
        return found

    def cancel(self) -> None:
        """Cancels the tasks that have not ended; their `on_end` is not called any more."""
        self._cancelled = [each.task for each in (*self._started_s, *self._late)]
        self._started_s.clear()
        self._late.clear()
        self._stop_timer()
        for task in self._cancelled:
            task.cancel()

    async def wait_for_cancelled(self) -> None:
        if self._cancelled:
            await asyncio.wait(self._cancelled, timeout=GRACE_S)

    def _read_clock(self) -> float:
        return self._loop.time() - BlockedTime.total_s

    def _set_timer(self) -> None:
        if self._timeout_s is not None and self._started_s:
            self._due_s = next(iter(self._started_s.values())) + self._timeout_s
            delay_s = self._due_s - self._read_clock()
            self._timer = self._loop.call_later(delay_s, self._cancel_late, context=self.context)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_late(self) -> None:
        assert self._timeout_s is not None
        # not who is late by now: after a long step of the loop, a task may not have had its turn since it was started
        latest_s = min(self._due_s, self._read_clock()) - self._timeout_s + ROUNDING_S
        late = list(takewhile(lambda task: self._started_s[task] <= latest_s, self._started_s))
        for task in late:
            if task.task.done():
                continue  # it ended in time, and its callback comes next
            del self._started_s[task]
            self._late.add(task)
            task.has_timed_out = True
            task.task.cancel()
            self._loop.call_later(GRACE_S, task.abandon, context=self.context)
        self._timer = None
        self._set_timer()


class ContainedTask(Settled[T], ABC):
    """A contained coroutine in its own task. Subclasses say what is awaited and what happens then.

    An episode in flight is one of these, and ten thousand may be, so that there is no second task that waits for it.
    """

    __slots__ = ("_limit", "has_timed_out", "task")

    def __init__(self, limit: TimeLimit):
        super().__init__()
        self._limit, self.has_timed_out = limit, False

    @abstractmethod
    def call(self) -> Awaitable[T]:
        """Calls the contained code; runs in the task."""

    @abstractmethod
    def on_end(self) -> None:
        """Called once: when the task has ended, or was abandoned."""

    def start(self) -> None:
        self.task = asyncio.create_task(self._settle(), name="reinforge-contained")
        if isinstance(self.task, RunTask):
            self.task.scope, self.task.is_main = self, True
        self.task.add_done_callback(self, context=self._limit.context)
        self._limit.watch(self)

    def get(self) -> T:
        if not self.task.done():
            raise Abandoned
        if self.has_timed_out and (self.task.cancelled() or isinstance(self.error, asyncio.CancelledError)):
            raise TimedOut
        self.task.result()  # raises CancelledError if the task was cancelled before it began
        return super().get()

    def abandon(self) -> None:
        if self._limit.forget(self):
            logger.warning("a timed-out agent or evaluator ignores its cancellation and was abandoned")
            self.on_end()

    def __call__(self, task: asyncio.Task[None]) -> None:
        if self._limit.forget(self):
            self.on_end()

    async def _settle(self) -> None:
        SCOPE.set(self)
        try:
            self.result = await self.call()
        except BaseException as error:  # noqa: BLE001  a task that raises SystemExit would stop the loop
            self.error = error


class _AwaitedTask(ContainedTask[T]):
    __slots__ = ("_call", "ended")

    def __init__(self, call: Callable[[], Awaitable[T]], limit: TimeLimit):
        super().__init__(limit)
        self._call = call
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def call(self) -> Awaitable[T]:
        return self._call()

    def on_end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run_contained(call: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
    """Awaits `call()` in its own task and returns its result.

    Args:
        timeout_s: Time limit in seconds; the time for which the loop was blocked does not count. None: no limit.
    """
    limit = TimeLimit(timeout_s)
    task = _AwaitedTask(call, limit)
    task.start()
    try:
        await task.ended
    except asyncio.CancelledError:  # the run stops
        limit.cancel()
        await limit.wait_for_cancelled()
        raise
    return task.get()
