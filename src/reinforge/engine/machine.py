"""What this machine has, looked up without torch: processor cores and memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # the memory that a container may use, where there is a limit


def count_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_machine(cgroup_limit: Path = CGROUP_LIMIT) -> int | None:
    """Returns the machine's memory in bytes, or the limit of the container of this process; None: unknown."""
    total = None
    with contextlib.suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(ValueError, OSError):  # the file says "max" where there is no limit
        limit = int(cgroup_limit.read_text())
        total = limit if total is None else min(total, limit)
    return total
