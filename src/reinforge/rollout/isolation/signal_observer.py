"""Kills a run that a signal does not reach, since code in it holds Python's interpreter lock: a process of its own.

    python signal_observer.py PROCESSES RUN SIGNALS LIMIT_S MESSAGE

Its standard input is the socket to which Python's signal handlers write, even while no thread of the run can move. The
run's own thread reads it at once, so a signal that stays unread is one that the run cannot take. Imports nothing but
the standard library, and `processes.py` by its path.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import socket
import sys
import time

TICK_S = 0.25
SECOND_S = 1.0  # seconds for which two signals stay unread before the run is killed


def main(processes: str, run: int, signals: frozenset[int], limit_s: float, message: str) -> None:
    unread_s = 0.0
    try:
        reader = socket.socket(fileno=0)
    except OSError:  # an agent has closed it, and its number is another file's now
        return
    with reader:
        while os.getppid() == run:
            found = peek(reader)
            if found == b"":
                return  # the run has ended
            count = sum(number in signals for number in found or b"")
            unread_s = unread_s + TICK_S if count else 0.0
            if unread_s > (limit_s if count == 1 else min(SECOND_S, limit_s)):
                break
    if os.getppid() == run:
        tree = runpy.run_path(processes)["list_descendants"](run)
        with contextlib.suppress(OSError):
            os.write(2, f"\nerror: {message}\n".encode(errors="backslashreplace"))
        for pid in [run, *(pid for pid in tree if pid != os.getpid())]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, 9)


def peek(reader: socket.socket) -> bytes | None:
    """Returns what is unread, after a tick; None: nothing, empty: the other end is closed."""
    ready, _, _ = select.select([reader], [], [], TICK_S)
    if not ready:
        return None
    time.sleep(TICK_S)
    try:
        return reader.recv(64, socket.MSG_PEEK)
    except BlockingIOError:  # the run has read it
        return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), frozenset(map(int, sys.argv[3].split(","))), float(sys.argv[4]), sys.argv[5])
