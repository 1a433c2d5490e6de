"""Runs the sides of a comparison in separate processes, taking turns.

Each side is loaded and warmed up once. Then the sides make steps alternately (A B, B A, A B, ...), so both steps of a
pair see the same machine. Separate processes keep thread pools and memory apart; a waiting side sleeps in `recv`.
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
"""Most seconds that one step may take."""


class Turns:
    """Called by a side's own loop before and after each step.

    Args:
        connection: Connection to the process that requests steps.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._begun_s, self._begun_cpu_s = 0.0, 0.0
        self._base = 0
        self._peak = Peak()

    def begin(self) -> None:
        """Waits until a step is requested; exits if there are no more."""
        if not self._base:
            gc.collect()
            self._base = self._peak.reset()
        if not self._connection.recv():
            os._exit(0)  # the rest of the side's own loop is not measured
        self._begun_s, self._begun_cpu_s = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begun_s

    def end(self, **parts: float) -> None:
        """Reports the time and memory of the step.

        Args:
            parts: Seconds of the step's parts.
        """
        figures = {"seconds": self.seconds, "cpu": time.process_time() - self._begun_cpu_s, **parts}
        self._connection.send({**figures, "loaded": self._base, "peak": self._peak.read() - self._base})


class Peak:
    """Peak memory of this process: the kernel's high-water mark if it can be reset, else by polling."""

    def __init__(self) -> None:
        self._seen = 0
        self._has_mark = self._reset_mark()
        if not self._has_mark:
            threading.Thread(target=self._poll, daemon=True).start()

    def reset(self) -> int:
        """Resets the peak; returns the bytes in use now."""
        now = psutil.Process().memory_info().rss
        self._seen = now
        self._has_mark = self._has_mark and self._reset_mark()
        return now

    def read(self) -> int:
        """Returns the peak since the last reset, in bytes."""
        if not self._has_mark:
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

    def _poll(self) -> None:
        process = psutil.Process()
        while True:
            self._seen = max(self._seen, process.memory_info().rss)
            time.sleep(0.002)


@dataclass
class Side:
    """One running side.

    Attributes:
        name: Name to print.
        seconds: Seconds of each measured step.
        parts: Seconds of the parts of each measured step; `cpu` is CPU time over all threads, `loaded` the bytes that
            were in use after loading.
        peak: Peak memory of all steps in bytes, above what was in use after loading.
    """

    name: str
    process: Any
    connection: Connection
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    peak: int = 0

    def step(self, *, measured: bool = True) -> float:
        """Requests one step and returns its seconds."""
        self.connection.send(True)
        figures = self._receive()
        self.peak = max(self.peak, figures.pop("peak"))
        seconds = figures.pop("seconds")
        if measured:
            self.seconds.append(seconds)
            for name, value in figures.items():
                self.parts.setdefault(name, []).append(value)
        return seconds

    def _receive(self) -> dict[str, Any]:
        if not self.connection.poll(LIMIT_S):
            raise SystemExit(f"{self.name}: no step within {LIMIT_S:.0f} s")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            raise SystemExit(f"{self.name}: its process ended; see its output above") from None

    def stop(self) -> None:
        """Ends the side's process."""
        with contextlib.suppress(OSError):  # already ended
            self.connection.send(False)
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def start_side(name: str, run: Callable[..., None], *args: Any) -> Side:
    """Starts `run(turns, *args)` in a new process; it calls `turns` before and after each step."""
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
        os.chdir(folder)  # trainers write into the current folder
        sys.stdout = sys.stderr
        run(Turns(connection), *args)


def alternate(sides: list[Side], pairs: int, warm_up: int = 1) -> None:
    """Runs the steps of all sides alternately; the order is reversed after every pair."""
    for side in sides:
        for _ in range(warm_up):
            side.step(measured=False)
    for number in range(pairs):
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.step()
        times = ", ".join(f"{side.name} {side.seconds[-1]:.3f} s" for side in sides)
        print(f"  pair {number + 1}: {times}", flush=True)


def format_spread(values: list[float], unit: str = "", digits: int = 2) -> str:
    """Returns minimum, median and maximum of some values as text.

    Example: [1.0, 3.0, 2.0] -> "min 1.00  median 2.00  max 3.00".
    """
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"min {low:.{digits}f}{unit}  median {middle:.{digits}f}{unit}  max {high:.{digits}f}{unit}"


def compute_ratios(ours: Side, theirs: Side, part: str | None = None) -> list[float]:
    """Returns their seconds divided by ours, pair by pair, for whole steps or a part of them."""
    columns = [side.seconds if part is None else side.parts[part] for side in (ours, theirs)]
    return [b / a for a, b in zip(*columns, strict=True)]
