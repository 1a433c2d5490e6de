"""Finds and kills the processes that an agent has started, so that none outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
NOT_WAITED_FOR = b"Z"  # state of a process that has already exited
ROUND_S = 0.02
MAX_ROUNDS = 10  # how often marked processes are looked for: one may start another while it is killed


@dataclass(frozen=True, slots=True)
class RunningProcess:
    parent: int
    group: int
    resident_bytes: int


def kill_group(leader: int) -> None:
    """Kills a process that leads its own group, its whole group, and its descendants in other groups."""
    descendants = list_descendants(leader)
    kill_members(leader)
    _kill(descendants)


def kill_members(group: int) -> None:
    """Kills the processes of a group; takes microseconds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills the processes that were started with `mark` in their environment, also those that left their group.

    A process that its parent has left behind (a daemon) has no other trace of who has started it. Does nothing where
    the environment of a process cannot be read (macOS).

    Args:
        mark: A variable in the form NAME=value, with a value that no other process has.
    """
    for _ in range(MAX_ROUNDS):
        found = [pid for pid in list_processes() if pid != os.getpid() and _has_variable(pid, mark)]
        if not found:
            return
        _kill(found)
        time.sleep(ROUND_S)  # a killed process is there until the system has taken it down


def _has_variable(pid: int, variable: str) -> bool:
    try:
        return variable.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # it has exited, belongs to another user, or there is no such file here
        return False


def kill_descendants() -> None:
    """Kills every process that this one has started and that still runs, with all that those have started."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    kept = getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)  # ends by itself after it has cleaned up
    _kill([pid for pid in list_descendants(os.getpid()) if pid != kept])


def list_descendants(pid: int) -> list[int]:
    children = defaultdict(list)
    for child, process in list_processes().items():
        children[process.parent].append(child)
    found, open_ = [], [pid]
    while open_:
        new = children[open_.pop()]
        found += new
        open_ += new
    return found


def describe_exit(code: int) -> str:
    """Returns how a process exited, as the end of a sentence.

    Example: 3 -> "exited with code 3"; -9 -> "was killed by SIGKILL".
    """
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def list_processes() -> dict[int, RunningProcess]:
    if not (PROC / "self" / "stat").exists():
        return _ask_ps()
    page = os.sysconf("SC_PAGE_SIZE")
    processes = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] != NOT_WAITED_FOR:
                    processes[int(folder.name)] = RunningProcess(int(fields[1]), int(fields[2]), int(fields[21]) * page)
    return processes


def _ask_ps() -> dict[int, RunningProcess]:
    if os.name == "nt":
        return {}
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid=,rss="], capture_output=True, text=True, check=False)
    rows = ([int(field) for field in line.split()] for line in listed.stdout.splitlines())
    return {pid: RunningProcess(parent, group, kib << 10) for pid, parent, group, kib in rows}
