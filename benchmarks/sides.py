"""The sides of a comparison, each in a process of its own, which take turns.

Both are loaded and warmed up once and then make one step after the other on request (A B, B A, A B, ...), so each pair
of steps sees the same machine. A process of its own keeps either side's pools of threads and its memory out of the
other's figures; the side that waits sleeps in `recv`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 1500.0
"""Seconds that one step may take."""


class Turns:
    """What a side's own loop calls around each step.

    Args:
        connection: To the process that asks for steps.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._begun_s, self._begun_cpu_s = 0.0, 0.0
        self._base = 0
        self._peak = _Peak()

    def begin(self) -> None:
        """Waits until a step is asked for; ends the process where no more will be."""
        if not self._base:
            gc.collect()
            self._base = self._peak.reset()
        if not self._connection.recv():
            os._exit(0)  # whatever the side's own loop would still do is not measured
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """How long the step has gone on."""
        return time.perf_counter() - self._begun_s

    def end(self, **parts: float) -> None:
        """Tells what the step took.

        Args:
            parts: Seconds of the step's parts.
        """
        figures = {"seconds": self.seconds, "cpu": time.process_time() - self._begun_cpu_s, **parts}
        self._connection.send({**figures, "peak": self._peak.read() - self._base})


class _Peak:
    """The most memory that this process has held: the kernel's own mark where it can be reset, else by looking."""

    def __init__(self) -> None:
        self._seen = 0
        self._marks = self._reset_mark()
        if not self._marks:
            threading.Thread(target=self._look, daemon=True).start()

    def reset(self) -> int:
        """Forgets the peak so far; returns the bytes held now."""
        now = psutil.Process().memory_info().rss
        self._seen = now
        self._marks = self._marks and self._reset_mark()
        return now

    def read(self) -> int:
        """Returns the peak since the last reset, in bytes."""
        if not self._marks:
            return self._seen
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

    @staticmethod
    def _reset_mark() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _look(self) -> None:
        process = psutil.Process()
        while True:
            self._seen = max(self._seen, process.memory_info().rss)
            time.sleep(0.002)


@dataclass
class Side:
    """One side, running.

    Attributes:
        name: For a person.
        seconds: Of each measured step.
        parts: Seconds of the parts of each measured step; `cpu` is the processors' time, all threads together.
        peak: Most bytes it held in any step, beyond what it held after loading.
    """

    name: str
    process: Any
    connection: Connection
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0

    def step(self, *, measured: bool = True) -> float:
        """Has one step made and returns its seconds."""
        self.connection.send(True)
        figures = self._answer()
        self.peak = max(self.peak, figures.pop("peak"))
        seconds = figures.pop("seconds")
        if measured:
            self.seconds.append(seconds)
            for name, value in figures.items():
                self.parts.setdefault(name, []).append(value)
        return seconds

    def _answer(self) -> dict[str, Any]:
        if not self.connection.poll(LIMIT_S):
            raise SystemExit(f"{self.name}: no step within {LIMIT_S:.0f} s")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            raise SystemExit(f"{self.name}: its process ended; what it said stands above") from None

    def stop(self) -> None:
        """Ends its process."""
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.send(False)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start(name: str, run: Callable[..., None], *args: Any) -> Side:
    """Starts a side: `run(turns, *args)` in a process of its own, which calls `turns` around each step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, run, args), name=name, daemon=True)
    process.start()
    theirs.close()
    return Side(name, process, ours)


def _serve(connection: Connection, run: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # trainers write into the folder they are started in
        sys.stdout = sys.stderr
        run(Turns(connection), *args)


def alternate(sides: list[Side], pairs: int, warm_up: int = 1) -> None:
    """Has every side make its steps in turn; the order turns round with every pair."""
    for side in sides:
        for _ in range(warm_up):
            side.step(measured=False)
    for number in range(pairs):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.step()
        told = ", ".join(f"{side.name} {side.seconds[-1]:.3f} s" for side in sides)
        print(f"  pair {number + 1}: {told}", flush=True)


def spread(values: list[float], unit: str = "", digits: int = 2) -> str:
    """Returns least, median and most of some values.

    Example: [1.0, 3.0, 2.0] -> "min 1.00  median 2.00  max 3.00".
    """
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"min {low:.{digits}f}{unit}  median {middle:.{digits}f}{unit}  max {high:.{digits}f}{unit}"


def ratios(ours: Side, theirs: Side, part: str | None = None) -> list[float]:
    """Returns how often our seconds fit into theirs, pair by pair: of whole steps or of a part."""
    columns = [side.seconds if part is None else side.parts[part] for side in (ours, theirs)]
    return [b / a for a, b in zip(*columns, strict=True)]
