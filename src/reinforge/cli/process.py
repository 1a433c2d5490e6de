"""The command line as a process: output that cannot be written, and an exit that nothing can delay."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from reinforge.cli.output import say
from reinforge.errors import StorageError
from reinforge.safe_text import to_printable

LEAVE_S = 5.0  # seconds that threads of an agent may keep the process from exiting

OUTPUT, ERRORS = 1, 2

parting: int | None = None
"""A pipe to which a process writes that it ends by itself; a library may end it before, as Ray does with code 1."""


class TolerantFile(io.FileIO):
    """A file that drops what cannot be written, so that a full disk or a closed pipe does not stop the work."""

    failure: OSError | None = None

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # as FileIO's own
        """Writes data; after the first error it only pretends to."""
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return len(memoryview(data).cast("B"))


def run_process(work: Callable[[], Any], *, keeps_results: bool) -> NoReturn:
    """Runs a command, kills the processes that it has started, and exits with its exit code.

    Args:
        keeps_results: True if the results are in files too, so that losing the output is not a failure.
    """
    open_missing_descriptors()
    output = make_tolerant(sys.stdout, OUTPUT)
    sys.stdout, sys.stderr = output or sys.stdout, make_tolerant(sys.stderr, ERRORS) or sys.stderr
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = read_exit_code(leaving)
    except BaseException:  # noqa: BLE001  printed as Python would, but without waiting for anything
        say(traceback.format_exc(), err=True)
        code = 1
    failure = find_failure(output)
    if failure is not None and code == 0 and not keeps_results:
        print_error(f"cannot write to standard output: {failure.strerror}")
        code = StorageError.exit_code
    leave(code)


def open_missing_descriptors() -> None:
    """Opens the null device as standard input, output and error where they are closed.

    The next file that the process opens would get their numbers, and whatever is printed would go into that file.
    """
    for number in (0, OUTPUT, ERRORS):
        try:
            os.fstat(number)
        except OSError:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:
                pass
            if opened > number:
                os.dup2(opened, number)
                os.close(opened)


def make_tolerant(stream: TextIO | None, number: int) -> io.TextIOWrapper | None:
    """Returns a stream on a standard descriptor that drops what cannot be written; None: keep the given one."""
    if stream is not None:
        try:
            if stream.fileno() != number:
                return None
            stream.flush()
        except (OSError, ValueError):
            return None
    encoding, errors = getattr(stream, "encoding", None), getattr(stream, "errors", None)
    buffer = io.BufferedWriter(TolerantFile(number, "w", closefd=False))
    given = (getattr(stream, name, False) for name in ("line_buffering", "write_through"))  # the latter: python -u
    is_line_buffered = number == ERRORS or any(given)
    return io.TextIOWrapper(buffer, encoding=encoding, errors=errors, line_buffering=is_line_buffered)


def find_failure(stream: io.TextIOWrapper | None) -> OSError | None:
    """Returns why a stream's output was lost; None: it was not, or its reader did not want more."""
    if stream is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    failure = getattr(getattr(stream.buffer, "raw", None), "failure", None)
    return None if failure is None or failure.errno == errno.EPIPE else failure


def read_exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print_error(str(leaving.code))
    return 1


def print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"error: {to_printable(text)}\n")


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Exits: kills what the process has started, and does not wait for threads that do not finish."""
    from reinforge.rollout.isolation.processes import kill_descendants

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    kill_descendants()
    if parting is not None:
        with contextlib.suppress(OSError):
            os.write(parting, b".")
    if at_once:
        os._exit(code)
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):

        def give_up() -> None:
            time.sleep(LEAVE_S)
            os._exit(code)

        threading.Thread(target=give_up, name="reinforge-leave", daemon=True).start()
    raise SystemExit(code)
