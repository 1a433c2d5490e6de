"""The machine a benchmark runs on: is it free, and how fast does it multiply."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch


def refuse_if_busy(limit: float = 0.15, seconds: float = 1.0) -> None:
    """Stops the program with a sentence when other load is on the machine.

    Args:
        limit: Share of all cores that others may use.
        seconds: How long to look.
    """
    busy = psutil.cpu_percent(interval=seconds) / 100
    if busy > limit and "--force" not in sys.argv:
        raise SystemExit(
            f"the machine is busy: others use {busy:.0%} of its {os.cpu_count()} cores, so figures would be wrong; "
            "try again later, or give --force to look anyway"
        )


def matmul_gflops(size: int = 1024, seconds: float = 0.5) -> float:
    """Returns billions of float32 operations a second in a square matrix product, measured in a thread that ends.

    A pool of workers that stayed in this thread would slow down the engine's.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_multiply, size, seconds).result()


def _multiply(size: int, seconds: float) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start) / 1e9


def describe() -> str:
    """Returns one line that says where figures come from."""
    threads = torch.get_num_threads()
    return f"{os.cpu_count()} cores, {threads} threads, torch {torch.__version__}, matmul {matmul_gflops():.0f} GFLOP/s"
