"""The machine a benchmark runs on: is it free, how fast does it multiply, and how fast does it read memory.

python benchmarks/machine.py    products and memory in float32 and bfloat16, with one thread and with all

The limits of a machine are what its own best kernels reach here: operations a second of a large square product, and
bytes a second of reading weights that are in no cache. A share of the limit is the least time that the operations and
the bytes of a task would take at these rates, divided by the time that it took.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import psutil
import torch

UNCACHED = 512 * 2**20
"""Bytes of weights that are read in turn, so that none is still in a cache."""
ROWS = (1, 8, 64)


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, in one dtype and with some threads."""

    flops: float  # operations a second
    bandwidth: float  # bytes a second, read from memory

    def find_least_time(self, operations: float, num_bytes: float) -> float:
        """Returns the seconds that a task takes at least: to compute or to read, whichever takes longer."""
        return max(operations / self.flops, num_bytes / self.bandwidth)


def measure_limits(dtype: torch.dtype = torch.float32, seconds: float = 0.5) -> Limits:
    """Measures with the current number of threads, in a thread that ends."""
    threads = torch.get_num_threads()

    def measure() -> Limits:
        torch.set_num_threads(threads)  # a new thread would use all
        return Limits(_measure_flops(dtype, seconds), _measure_bandwidth(seconds))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(measure).result()


def _repeat(run: Callable[[], int], seconds: float) -> float:
    """Returns the best rate of a few parts of the time: other load and turbo only ever slow it down."""
    run()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds / 5:
            done += run()
        best = max(best, done / (time.perf_counter() - start))
    return best


def _measure_flops(dtype: torch.dtype, seconds: float, size: int = 1024) -> float:
    """Returns the rate of the faster one of torch's two libraries: its own choice, or oneDNN."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b)]
    if torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))

    def run(product: Callable[[], object]) -> int:
        product()
        return 2 * size**3

    return max(_repeat(partial(run, each), seconds) for each in products)


def _measure_bandwidth(seconds: float) -> float:
    numbers = torch.ones(UNCACHED // 4)

    def run() -> int:
        numbers.sum()
        return UNCACHED

    return _repeat(run, seconds)


def measure_skinny(rows: int, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Returns operations a second of products of few rows with weights that are in no cache, as decode steps make."""
    inputs, outputs = 1536, 4096
    count = max(1, UNCACHED // (inputs * outputs * dtype.itemsize))
    weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in range(count)]
    x = torch.randn(rows, inputs, dtype=dtype)

    def run() -> int:
        for weight in weights:
            torch.nn.functional.linear(x, weight)
        return 2 * rows * inputs * outputs * count

    return _repeat(run, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    parser.parse_args()
    refuse_if_busy()
    print(describe())
    print(
        f"{'dtype':<10}{'threads':>8}{'square':>12}"
        + "".join(f"{f'{rows} rows':>12}" for rows in ROWS)
        + f"{'read':>12}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for threads in sorted({1, torch.get_num_threads()}):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            limits = measure_limits(dtype)
            skinny = [measure_skinny(rows, dtype) for rows in ROWS]
            torch.set_num_threads(before)
            products = "".join(f"{each / 1e9:>6.0f} GF/s " for each in (limits.flops, *skinny))
            print(f"{str(dtype).removeprefix('torch.'):<10}{threads:>8}{products}{limits.bandwidth / 1e9:>6.1f} GB/s")


if __name__ == "__main__":
    main()
