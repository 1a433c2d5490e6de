"""Runs an agent's or an evaluator's coroutine so that it can fail only itself, not the run's event loop.

    raises anything, SystemExit and GeneratorExit too     the caller gets an exception
    ignores its cancellation                              abandoned after `GRACE_S`; the run continues without it
    cancels every task of the loop                        `RunTask` refuses for those of the run and of other episodes
    stops the loop, or raises SystemExit in a callback    `run_loop` starts the loop again
    blocks the loop                                       `trainer/guard.py` interrupts it with `LoopBlocked`

It shares the process, so it can still end it or close its files: `isolation: process` prevents that too.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from reinforge.errors import StorageError

T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""Seconds that a cancelled coroutine gets to end."""
CLOSE_S = 5.0
"""Seconds that closing a loop may take."""


class Scope:
    """The tasks and callbacks of one contained coroutine; compared by identity."""


SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("reinforge_scope", default=None)
"""The contained coroutine in which the current code runs; None: code of the run itself."""


class TimedOut(TimeoutError):
    """A contained coroutine did not end in time."""


class Abandoned(TimedOut):
    """It did not end when it was cancelled either, so it still runs."""


class Blocked(TimedOut):
    """It blocked the event loop until it was interrupted; the message says for how long."""


class LoopBlocked(BaseException):
    """Raised inside code that blocks the event loop; not an `Exception`, which agents catch."""


class BlockedTime:
    """Seconds for which the event loop was blocked; the coroutines that only waited for it get them back."""

    total_s = 0.0


class RunTask(asyncio.Task[Any]):
    """A task that contained code can cancel only if that code created it, or if no other code needs it.

    Attributes:
        scope: The contained coroutine that the task belongs to; None: the run.
        is_main: True for the task of a contained coroutine itself.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
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
    """Runs a loop until a task is done and returns its result; starts the loop again if other code stops it.

    Raises:
        StorageError: The loop's own file descriptors were closed.
    """
    while not task.done():
        try:
            loop.run_until_complete(task)
        except RuntimeError:
            if not task.done():
                if loop.is_closed():
                    raise
                logger.warning("an agent or evaluator stopped the event loop; it was started again")
        except OSError as error:
            if task.done():
                break
            if error.errno != errno.EBADF:
                raise
            raise StorageError(describe_closed_files()) from error
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
                logger.warning("a task that an agent or evaluator has started does not end: %s", task.get_name())
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


def describe_closed_files() -> str:
    """Returns the message for a process whose files were closed by other code."""
    return (
        "the run's own files were closed: an agent or an evaluator has closed file descriptors that are not its own "
        "(os.close, os.closerange)\n    fix: close only what that code has opened, or run it in a process of its own "
        "with `isolation: process`"
    )


@dataclass(slots=True)
class _Settled(Generic[T]):
    result: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """Returns the result or raises the error, one that any caller may catch."""
        error = self.error
        if error is None:
            return self.result  # type: ignore[return-value]
        if isinstance(error, LoopBlocked):
            raise Blocked(str(error))
        if not isinstance(error, Exception | asyncio.CancelledError | SystemExit):
            raise RuntimeError(repr(error)).with_traceback(error.__traceback__)
        raise error


async def run_contained(call: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
    """Awaits `call()` in a task of its own and returns its result.

    Args:
        call: Other people's code.
        timeout_s: Time limit in seconds; the time for which the loop was blocked does not count. None: no limit.

    Raises:
        TimedOut: The time limit was reached; see its subclasses.
        RuntimeError: It raised a BaseException such as GeneratorExit or KeyboardInterrupt.
        Exception: Whatever else it raised, also CancelledError and SystemExit.
    """
    task = _start(call)
    try:
        done = await _wait(task, timeout_s)
        if done:
            return task.result().get()
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_S)
    except asyncio.CancelledError:
        if not task.done():  # the run stops
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
        raise
    if not task.done():
        logger.warning("a timed-out agent or evaluator ignores its cancellation and was abandoned")
        raise Abandoned
    settled = task.result()
    if isinstance(settled.error, asyncio.CancelledError):
        raise TimedOut
    return settled.get()


def _start(call: Callable[[], Awaitable[T]]) -> asyncio.Task[_Settled[T]]:
    async def settle() -> _Settled[T]:
        try:
            return _Settled(await call())
        except BaseException as error:  # noqa: BLE001  a task that raises SystemExit would stop the loop
            return _Settled(error=error)

    scope, context = Scope(), contextvars.copy_context()
    context.run(SCOPE.set, scope)
    work: Coroutine[Any, Any, _Settled[T]] = settle()
    task = asyncio.create_task(work, context=context)
    if isinstance(task, RunTask):
        task.scope, task.is_main = scope, True
    return task


async def _wait(task: asyncio.Task[Any], timeout_s: float | None) -> bool:
    """Waits for a task; returns False if it is not done in time."""
    while True:
        blocked_s = BlockedTime.total_s
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        timeout_s = BlockedTime.total_s - blocked_s
        if done or timeout_s <= 0:
            return bool(done)
