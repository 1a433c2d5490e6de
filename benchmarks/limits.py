"""Where the time goes: each part of sampling and training, as a share of what the machine could do at most.

    python benchmarks/limits.py                       1.7 and 135 million parameters, float32
    python benchmarks/limits.py --sizes 135m 0.5b     others; --dtype bfloat16; --lora 16
    python benchmarks/limits.py --products            a step with oneDNN's products and with torch's own, in pairs
    python benchmarks/limits.py --lengths 2000 4000 8000 16000 --sizes 135m --lora 16 --dtype bfloat16

`--lengths`: time and memory of a step on one conversation of so many tokens, the last 200 of them a reply, with
activation checkpointing and without; memory is the peak above the loaded model.

prefill    16 prompts of 128 tokens, nothing shared
decode     64 replies at a time, in contexts of 128 to 160 tokens
forward, backward, optimizer      one step on 32 rows of 64 + 64 tokens, of which nothing is shared, with AdamW

The share is the least time that the products with weights would take at the machine's rate of large products, or that
reading weights (decode) and optimizer state would take at its bandwidth (`machine.py`), divided by the time that the
part took. Attention, norms, activations and sampling are not counted as work: their time lowers the share. Medians of
`--rounds` rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from benchmarks.machine import Limits, describe, measure_limits, refuse_if_busy
from benchmarks.sampler import make_prompts, sample_all
from benchmarks.sharding import SHAPES, make_sample, random_model
from benchmarks.sides import Peak
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.model import products
from reinforge.engine.training.learner import Learner
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec

PROMPTS, PROMPT, ROWS, NEW = 16, 128, 64, 32
SAMPLES, HALF, REPLY = 32, 64, 200
STATE_BYTES = 28
"""Of a float32 weight in a step of AdamW: it, its gradient and two moments are read, all but the gradient written."""


class Timer:
    """Adds up the seconds of some functions."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return timed


def count_linear(engine: Engine) -> tuple[int, int, int]:
    """Returns the weights of the layers' products, of the output layer, and of what is trained."""
    layers = sum(
        layer.weight.numel()
        for name, layer in engine.model.base.named_modules()
        if isinstance(layer, torch.nn.Linear) and "lora_" not in name
    )
    trained = sum(parameter.numel() for parameter in engine.model.trained_parameters.values())
    return layers, engine.model.vocab_size * engine.model.config.hidden_size, trained


def measure_round(engine: Engine, number: int) -> dict[str, float]:
    """Returns the seconds of each part."""
    vocab_size, found = engine.model.vocab_size, dict[str, float]()

    def sample(count: int, new: int, seed: int) -> float:
        prompts = make_prompts(count, PROMPT, vocab_size, seed=seed)
        started = time.perf_counter()
        sample_all(engine, prompts, new)
        return time.perf_counter() - started

    found["prefill"] = sample(PROMPTS, 1, 4 * number)
    found["decode"] = (sample(ROWS, NEW + 1, 4 * number + 1) - sample(ROWS, 1, 4 * number + 2)) / NEW
    rng, timer = np.random.default_rng(number), Timer()
    tokens = rng.integers(10, vocab_size, (SAMPLES, 2, HALF)).tolist()
    logprobs = (-float(np.log(vocab_size)),) * HALF
    samples = [
        make_sample(TokenLogprobs(tuple(prompt), tuple(reply), logprobs), (-1.0) ** place)
        for place, (prompt, reply) in enumerate(tokens)
    ]
    engine.begin_job()
    backward = timer.wrap("backward", torch.Tensor.backward)
    optimizer = timer.wrap("optimizer", Learner.optimizer_step)
    step = timer.wrap("step", Learner.step)
    with (
        mock.patch.object(torch.Tensor, "backward", backward),
        mock.patch.object(Learner, "optimizer_step", optimizer),
        mock.patch.object(Learner, "step", step),
    ):
        engine.update(samples, LossSpec("clipped_pg"), progress_start=0.0, progress_end=1.0)
    engine.end_job()
    asyncio.run(engine.policy.publish(number + 1))
    found |= {"backward": timer.seconds["backward"], "optimizer": timer.seconds["optimizer"]}
    found["forward"] = timer.seconds["step"] - timer.seconds["backward"] - timer.seconds["optimizer"]
    return found


def find_least(engine: Engine, limits: Limits, *, lora: bool) -> dict[str, float]:
    """Returns the least seconds of each part."""
    layers, head, trained = count_linear(engine)
    itemsize = engine.model.dtype.itemsize
    tokens, predicted = 2 * SAMPLES * HALF, SAMPLES * HALF
    forward = 2.0 * (layers * tokens + head * predicted)
    return {
        "prefill": limits.find_least_time(2.0 * (layers * PROMPTS * PROMPT + head * PROMPTS), 0),
        "decode": limits.find_least_time(2.0 * ROWS * (layers + head), itemsize * (layers + head)),
        "forward": limits.find_least_time(forward, 0),
        "backward": limits.find_least_time(forward * (1 if lora else 2), 0),
        "optimizer": limits.find_least_time(0, STATE_BYTES * trained),
    }


def load(model: str, args: argparse.Namespace, **policy: Any) -> Engine:
    lora = LoRAConfig(r=args.lora) if args.lora else None
    config = PolicyConfig(
        model=model,
        dtype=args.dtype,
        max_num_seqs=ROWS,
        kv_cache_mb=0,
        lora=lora,
        batch={"steps_per_job": 1},
        **policy,
    )
    engine = Engine.load(config, seed=0, device="cpu")
    engine.policy.sampler._eos[:] = False  # every reply has its full length
    return engine


def compare_products(size: str, args: argparse.Namespace) -> None:
    """Prints how many times as fast forward and backward pass are with oneDNN's products, in alternating pairs."""
    with random_model(SHAPES[size]) as model:
        ours = load(model, args)
        with mock.patch.object(products, "measure_speedup", return_value=1.0):
            own = load(model, args)
        rounds = [[measure_round(engine, number) for engine in (own, ours)] for number in range(args.rounds + 1)]
        for engine in (ours, own):
            engine.close()
    pairs = [[each["forward"] + each["backward"] for each in pair] for pair in rounds[1:]]
    ratios = sorted(slow / fast for slow, fast in pairs)
    print(
        f"{size}, {args.dtype}{f', LoRA {args.lora}' if args.lora else ''}: "
        f"{statistics.median(p[0] for p in pairs):.2f} s by torch's own products, "
        f"{statistics.median(p[1] for p in pairs):.2f} s by oneDNN's: "
        f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}"
    )


def measure_lengths(size: str, args: argparse.Namespace) -> None:
    """Prints seconds and memory of a step on one conversation of each length, each in a process of its own."""
    with random_model({**SHAPES[size], "max_position_embeddings": max(args.lengths)}) as model:
        for recomputes in (False, True):
            for length in args.lengths:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    seconds, used = process.submit(measure_length, model, args, length, recomputes=recomputes).result()
                print(
                    f"{size}, {args.dtype}{f', LoRA {args.lora}' if args.lora else ''}, {length:,} tokens, "
                    f"{'with' if recomputes else 'without'} activation checkpointing: "
                    f"{seconds:.2f} s, {used / 2**20:,.0f} MiB",
                    flush=True,
                )


def measure_length(model: str, args: argparse.Namespace, length: int, *, recomputes: bool) -> tuple[float, int]:
    """Returns the least seconds of a step, and the bytes at its peak above the loaded model."""
    engine, rng, seconds = load(model, args, activation_checkpointing=recomputes), np.random.default_rng(0), []
    tokens = rng.integers(10, engine.model.vocab_size, length).tolist()
    logprobs = (-float(np.log(engine.model.vocab_size)),) * REPLY
    sample = make_sample(TokenLogprobs(tuple(tokens[:-REPLY]), tuple(tokens[-REPLY:]), logprobs), 1.0)
    peak = Peak()
    before = peak.reset()
    for _ in range(args.rounds):
        engine.begin_job()
        started = time.perf_counter()
        engine.update([sample], LossSpec("clipped_pg"), progress_start=0.0, progress_end=1.0)
        seconds.append(time.perf_counter() - started)
        engine.rollback()
    used = peak.read() - before
    engine.close()
    return min(seconds), used


def measure(size: str, args: argparse.Namespace, limits: Limits) -> None:
    with random_model(SHAPES[size]) as model:
        engine = load(model, args)
        try:
            measure_round(engine, 0)
            rounds = [measure_round(engine, number + 1) for number in range(args.rounds)]
            least = find_least(engine, limits, lora=bool(args.lora))
        finally:
            engine.close()
    whole = statistics.median(each["forward"] + each["backward"] + each["optimizer"] for each in rounds)
    print(f"{size}, {args.dtype}{f', LoRA {args.lora}' if args.lora else ''}: a step of training {whole:.2f} s")
    for name, seconds in least.items():
        times = [each[name] for each in rounds]
        shares = [seconds / each for each in times]
        spread = f"{min(shares):.2f} / {statistics.median(shares):.2f} / {max(shares):.2f} of the limit"
        print(f"  {name:<10}{1e3 * statistics.median(times):>10.1f} ms   {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=["1.7m", "135m"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0: all weights are trained")
    parser.add_argument("--products", action="store_true", help="compare oneDNN's products with torch's own")
    parser.add_argument("--lengths", nargs="+", type=int, help="conversations of so many tokens, instead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    if args.products:
        print(describe())
        for size in args.sizes:
            compare_products(size, args)
        return
    if args.lengths:
        print(describe())
        for size in args.sizes:
            measure_lengths(size, args)
        return
    limits = measure_limits(getattr(torch, args.dtype))
    print(f"{describe()}; limits {limits.flops / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s")
    for size in args.sizes:
        measure(size, args, limits)


if __name__ == "__main__":
    main()
