"""What a model that several processes divide takes of each one's memory, and where one process has too little.

    python benchmarks/sharding.py                        SmolLM's shape, 135 M parameters, one process and two
    python benchmarks/sharding.py --size 0.5b --gb 9     Qwen2.5-0.5B's shape, each process limited to 9 GB

Random weights in float32, all of them trained by AdamW: two jobs of one step each on 16 samples of 64 tokens, the
second with a snapshot of weights and optimizer that could undo it, then a checkpoint, which is loaded again. The peak
of a phase is that of its memory which no file holds (`RssAnon`, read every 5 ms); the limit is on the data that a
process may allocate (`RLIMIT_DATA`). Another program samples, so the model stays divided; with `--here` the processes
could sample themselves, for which they gather all weights after each job. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe
from benchmarks.sampler import SIZES, random_model
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.training.data_parallel import DataParallel, listen
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec
from tests.samples import make_sample

GB = 10**9
HOST = "127.0.0.1"
SHAPES = {
    **SIZES,
    "0.5b": {
        "family": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
NUM_SAMPLES, NUM_TOKENS = 16, 32  # tokens of a prompt, and of a reply


class Phases:
    """The most memory, in GB, and the seconds of what is done in turn."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        ended, peaks = threading.Event(), [0.0]
        watch = threading.Thread(target=watch_memory, args=(ended, peaks), daemon=True)
        watch.start()
        started = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - started
            ended.set()
            watch.join()
            self.found[name] = (max(peaks), seconds)


def watch_memory(ended: threading.Event, peaks: list[float]) -> None:
    while True:
        lines = Path("/proc/self/status").read_text().splitlines()
        peaks.append(next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / GB)
        if ended.wait(0.005):
            return


def work(rank: int, ports: Any, results: Any, barrier: Any, settings: dict[str, Any]) -> None:
    """Trains in one process; sends what it measured, and the fingerprint of its weights or what ended it."""
    if settings["gb"]:
        resource.setrlimit(resource.RLIMIT_DATA, (int(settings["gb"] * GB),) * 2)
    phases = Phases()
    try:
        end = train(rank, ports, barrier, phases, **settings)
    except Exception as error:  # noqa: BLE001  that is the finding
        end = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        barrier.abort()
    results.put((rank, phases.found, end))


def train(
    rank: int, ports: Any, barrier: Any, phases: Phases, *, size: int, model: str, folder: str, here: bool, gb: float
) -> str:
    batch = {"steps_per_job": 1, "micro_batch_tokens": 256}
    config = PolicyConfig.model_validate({"model": model, "batch": batch})
    load = partial(Engine.load, config, seed=0, device="cpu", samples_elsewhere=not here, divides=size > 1)
    engine = phases.run("load", load)
    if size > 1:
        listener = listen(HOST) if rank == 0 else None
        if listener is not None:
            ports.put(listener.getsockname()[1])
        barrier.wait()
        port = ports.get()
        ports.put(port)
        peers = DataParallel(rank, size, (HOST, port), listener, timeout_s=600)
        phases.run("divide", lambda: engine.join_peers(peers, "full"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 300, (NUM_SAMPLES, 2, NUM_TOKENS)).tolist()
    logprobs = (-6.0,) * NUM_TOKENS
    samples = [make_sample(TokenLogprobs(tuple(prompt), tuple(reply), logprobs), 1.0) for prompt, reply in tokens]
    checkpoint = Path(folder) / f"checkpoint-{size}"
    for job in range(2):
        engine.begin_job()
        update = partial(engine.update, samples, LossSpec("clipped_pg"), progress_start=job / 2)
        phases.run(f"job {job + 1}", partial(update, progress_end=(job + 1) / 2))
        engine.end_job()
        phases.run("fingerprint", engine.fingerprint)
        if job == 1:
            phases.run("write", lambda: engine.write(checkpoint, 2))
        asyncio.run(engine.policy.publish(job + 1))
    before = engine.fingerprint()
    barrier.wait()
    phases.run("read", lambda: engine.load_weights(checkpoint))
    after = engine.fingerprint()
    return before if before == after else f"{before}, but {after} after reading the checkpoint"


def run(size: int, settings: dict[str, Any]) -> list[tuple[int, dict[str, tuple[float, float]], str]]:
    """Returns what each process found, by its rank."""
    context = get_context("spawn")
    ports, results, barrier = context.Queue(), context.Queue(), context.Barrier(size)
    arguments = (ports, results, barrier, {**settings, "size": size})
    processes = [context.Process(target=work, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    found = sorted((results.get() for _ in processes), key=lambda each: each[0])
    for process in processes:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="135m")
    parser.add_argument("--processes", default="1,2", help="how many, one after the other")
    parser.add_argument("--gb", type=float, default=0.0, help="limit of each process, in 10^9 bytes; 0: none")
    parser.add_argument("--here", action="store_true", help="the processes that train sample, too")
    given = parser.parse_args()
    limit = f"each limited to {given.gb:g} GB" if given.gb else "without a limit"
    print(f"{describe()}\n{given.size}, {limit}, {'sampled here' if given.here else 'sampled elsewhere'}")
    with random_model(SHAPES[given.size]) as model, tempfile.TemporaryDirectory() as folder:
        for size in map(int, given.processes.split(",")):
            for rank, phases, end in run(size, {"model": model, "folder": folder, "here": given.here, "gb": given.gb}):
                print(f"process {rank + 1} of {size}: {end}")
                for name, (peak, seconds) in phases.items():
                    print(f"    {name:12} {peak:6.2f} GB {seconds:7.1f} s")


if __name__ == "__main__":
    main()
