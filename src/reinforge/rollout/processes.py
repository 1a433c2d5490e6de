"""Finds and kills the processes that an agent has started, so that none outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
NOT_WAITED_FOR = b"Z"
"""State of a process that has ended already."""


def kill_group(leader: int) -> None:
    """Kills a process that leads its own group, its whole group, and its descendants in other groups.

    Args:
        leader: The process; may have ended already.
    """
    descendants = list_descendants(leader)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    _kill(descendants)


def kill_descendants() -> None:
    """Kills every process that this one has started and that still runs, with all that those have started."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    kept = getattr(getattr(tracker, "_resource_tracker", None), "_pid", None)  # ends by itself after it has cleaned up
    _kill([pid for pid in list_descendants(os.getpid()) if pid != kept])


def list_descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, and those that they have started."""
    children = defaultdict(list)
    for child, parent in _list_parents().items():
        children[parent].append(child)
    found, open_ = [], [pid]
    while open_:
        new = children[open_.pop()]
        found += new
        open_ += new
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _list_parents() -> dict[int, int]:
    """Returns the parent of every running process."""
    if not (PROC / "self" / "stat").exists():
        return _ask_ps()
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state != NOT_WAITED_FOR:
                    parents[int(folder.name)] = int(parent)
    return parents


def _ask_ps() -> dict[int, int]:
    if os.name == "nt":
        return {}
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False)
    rows = (line.split() for line in listed.stdout.splitlines())
    return {int(pid): int(parent) for pid, parent in rows}
