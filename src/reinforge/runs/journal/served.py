"""What a server with a fallback did, by time, in the folder of the run that it serves.

    served.jsonl
    {"at_s": 1767225600.0, "threshold": -0.21, "margin": 0.02, "routes": {"local sure": 57, "upstream unsure": 20},
     "checks": {"agreed": 3}, "measured": {"calls": 20, "tokens": 1800, "priced": 20, "dollars": 0.02}}

A line holds what came since the last one. The first one is written when the server starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from reinforge.errors import StorageError, boundary
from reinforge.files import append_line, read_lines

logger = logging.getLogger(__name__)
SERVED = "served.jsonl"
PERIOD_S = 600.0  # seconds between lines, where there were requests

Amount = Annotated[float, Field(ge=0, le=1e15)]


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """What a server did."""

    at_s: Annotated[float, Field(ge=0, le=1e11)]  # seconds since the Unix epoch
    threshold: float | None  # in use; None: nothing stays local
    margin: float
    routes: Mapping[str, Amount]  # who answered and why -> requests
    checks: Mapping[str, Amount]  # what came of a check -> checks
    measured: Mapping[str, Amount]  # sums over the upstream's calls: `calls` and their `tokens`, `priced` and `dollars`

    def subtract(self, earlier: ServedCounts) -> ServedCounts:
        def count(name: str) -> dict[str, float]:
            old = getattr(earlier, name)
            return {key: more for key, all_ in getattr(self, name).items() if (more := all_ - old.get(key, 0)) > 0}

        return replace(self, routes=count("routes"), checks=count("checks"), measured=count("measured"))


def read_served(folder: Path) -> list[ServedCounts]:
    """Returns the lines of a run's log, the oldest first; a `StorageError` if it is damaged."""
    path = folder / SERVED
    if not path.exists():
        return []
    with boundary(StorageError, f"cannot read {path}"):
        lines = TypeAdapter(list[ServedCounts]).validate_python(read_lines(path))
    return sorted(lines, key=lambda line: line.at_s)


class ServedLog:
    """Appends a line now and then."""

    def __init__(self, folder: Path, period_s: float = PERIOD_S):
        self._path, self._period_s = folder / SERVED, period_s
        self._task: asyncio.Task[None] | None = None

    def start(self, read: Callable[[], ServedCounts]) -> None:
        """Begins with what the server did since it started, which `read` returns."""
        self._read, self._written = read, read()
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await self._append(self._written)
        while True:
            await asyncio.sleep(self._period_s)
            await self._write()

    async def _write(self) -> None:
        counts = self._read()
        line = counts.subtract(self._written)
        if line.routes:
            self._written = counts
            await self._append(line)

    async def _append(self, line: ServedCounts) -> None:
        try:
            await asyncio.to_thread(append_line, self._path, asdict(line))
        except StorageError as error:
            logger.warning("what was served is not in the log: %s", error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._write()
