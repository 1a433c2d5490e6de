"""Sampling by two Ray workers of one thread against one worker of two threads, in alternating pairs of one cluster.

python benchmarks/ray_workers.py             hidden 192, 4 layers, 16 conversations of 8 siblings, 48 new tokens
python benchmarks/ray_workers.py --new 200   longer replies
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, random_model
from reinforge.config.policy import PolicyConfig
from reinforge.scale.ray.cluster import RayConnection
from reinforge.types.request import ModelRequest, SamplingParams

EXAMPLES, SIBLINGS = 16, 8


def make_requests(round_number: int, new_tokens: int) -> list[ModelRequest]:
    """Returns the requests of one round: siblings share a prompt of about 60 tokens and differ in their seed."""
    words = "what is the capital of France? play at row 1 column 2, then at row 3 column "
    return [
        ModelRequest(
            [{"role": "user", "content": f"{words}{example} of {round_number}"}],
            SamplingParams(max_tokens=new_tokens, seed=1000 * round_number + SIBLINGS * example + sibling),
        )
        for example in range(EXAMPLES)
        for sibling in range(SIBLINGS)
    ]


async def sample_all(group, requests: Sequence[ModelRequest]) -> int:
    """Returns how many tokens were sampled."""
    replies = await asyncio.gather(*(group.policy.sample(request) for request in requests))
    return sum(reply.num_completion_tokens for reply in replies)


async def compare(sides: dict[str, object], args: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.pairs + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            requests = make_requests(number, args.new)
            start = time.perf_counter()
            tokens = await sample_all(sides[name], requests)
            seconds = time.perf_counter() - start
            if number:  # the first round warms up
                rates[name].append(len(requests) / seconds)
            print(f"round {number}: {name}: {len(requests) / seconds:.0f} replies/s, {tokens / seconds:.0f} tokens/s")
    two, one = rates.values()
    ratios = sorted(a / b for a, b in zip(two, one, strict=True))
    print(f"{describe()}; {args.pairs} pairs")
    for name, values in rates.items():
        print(f"{name}: {min(values):.0f} / {statistics.median(values):.0f} / {max(values):.0f} replies/s")
    print(f"ratio: {ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=48, help="new tokens of each reply")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--force", action="store_true", help="measure although other load is on the machine")
    args = parser.parse_args()
    refuse_if_busy()
    connection = RayConnection(None, 4, {"CPU": 1.0})
    from reinforge.scale.ray.workers import WorkerGroup

    with random_model(SIZES["1.7m"]) as folder:
        policy = PolicyConfig(model=folder)
        sides = {
            name: WorkerGroup.load(
                policy, num_workers=count, min_workers=1, resources={"CPU": threads}, seed=0, device="cpu"
            )
            for name, count, threads in (("2 workers of 1 thread", 2, 1), ("1 worker of 2 threads", 1, 2))
        }
        try:
            asyncio.run(compare(sides, args))
        finally:
            for group in sides.values():
                group.close()
            connection.close()


if __name__ == "__main__":
    main()
