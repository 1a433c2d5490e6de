"""Runs one program and, once it has ended, kills whatever it has left: a process of its own around each program.

    python supervisor.py RUN MEMORY CWD NUM_MOUNTS FOLDER PLACE FOLDER PLACE... PROGRAM ARGUMENTS...

The program starts in CWD and sees each FOLDER at its PLACE; other processes see what was there before.

On Linux it adopts the program's orphans (`PR_SET_CHILD_SUBREAPER`), also those with an environment and a session of
their own (`env -i setsid ...`), so that all of them are its children in the end. It does the same when the run asks it
to (SIGTERM) or dies. Its exit code is the program's. Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of Linux's `prctl`
NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000  # flags of `unshare`
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # flags of `mount`
CANNOT_START = 127
END_S = 2.0
ROUND_S = 0.01


class Ended(BaseException):
    """The program is no longer wanted."""


def end(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def main(run: int, max_memory: int, cwd: str, mounts: list[str], command: list[str]) -> None:
    program, status = 0, int(signal.SIGKILL)  # as `wait` gives it
    try:
        signal.signal(signal.SIGTERM, end)
        if sys.platform == "linux":
            prctl = ctypes.CDLL(None).prctl
            prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == run:
            program = start(max_memory, cwd, mounts, command)
            status = wait_for(program)
    except Ended:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if program:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program, signal.SIGKILL)
    kill_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def start(max_memory: int, cwd: str, mounts: list[str], command: list[str]) -> int:
    """Returns the process id of the program.

    `RLIMIT_DATA` counts what can be written to, so it fits Node and Go, which reserve more addresses than they use.
    """
    if pid := os.fork():
        return pid
    os.setsid()  # `kill 0` in a program is not meant for its supervisor
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    if max_memory:
        resource.setrlimit(resource.RLIMIT_DATA, (max_memory, max_memory))
    try:
        if mounts:
            mount_folders(mounts)
        os.chdir(cwd)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode(errors="backslashreplace"))
    os._exit(CANNOT_START)


def mount_folders(mounts: list[str]) -> None:
    """Mounts folders at their places, for this process and those that it starts.

    A namespace of mounts needs the rights of root, or a namespace of users, in which this user is itself alone.
    """
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    if library.unshare(NEW_MOUNTS):
        check(library.unshare(NEW_USERS | NEW_MOUNTS), "a namespace of mounts")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    check(library.mount(None, b"/", None, RECURSIVE | PRIVATE, None), "/")
    for folder, place in zip(mounts[::2], mounts[1::2], strict=True):
        check(library.mount(os.fsencode(folder), os.fsencode(place), None, BIND | RECURSIVE, None), place)


def check(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def wait_for(program: int) -> int:
    """Returns the program's exit status; waits for adopted processes too, so that none stays a zombie."""
    while True:
        pid, status = os.wait()
        if pid == program:
            return status


def kill_children() -> None:
    """Kills the children, and those that each of them leaves, until there are none."""
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ChildProcessError):  # there are none
        while time.monotonic() < deadline:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            for pid in list_children():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(ROUND_S)


def list_children() -> list[int]:
    own, found = str(os.getpid()).encode(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[1] == own:
                        found.append(int(name))
    return found


if __name__ == "__main__":
    run, max_memory, cwd, num_mounts, *rest = sys.argv[1:]
    end_of_mounts = 2 * int(num_mounts)
    main(int(run), int(max_memory), cwd, rest[:end_of_mounts], rest[end_of_mounts:])
