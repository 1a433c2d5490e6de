"""Sampling of conversations with the prefix cache against computing whole prompts, in alternating pairs.

    python benchmarks/prefix_cache.py          4 turns, 120 new tokens of context and 16 sampled a turn, groups of 8

One engine does both, so that model, random numbers and machine are the same; no training is involved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, Waiter, random_model
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.types.request import SamplingParams


def converse(engine: Engine, args: argparse.Namespace, seed: int) -> list[float]:
    """Returns the seconds of each turn; context is the same within a group, replies are not."""
    generator = torch.Generator().manual_seed(seed)
    histories: list[tuple[int, ...]] = [()] * args.episodes
    seconds = []
    for _ in range(args.turns):
        context = torch.randint(
            10, engine.model.vocab_size, (args.episodes // args.group, args.context), generator=generator
        )
        prompts = [history + tuple(context[i // args.group].tolist()) for i, history in enumerate(histories)]
        waiter = Waiter()
        requests = [SampleRequest(prompt, args.new, SamplingParams(), owner=waiter) for prompt in prompts]
        waiter.left = len(requests)
        start = time.perf_counter()
        engine.policy.sampler.submit(requests)
        waiter.done.wait()
        seconds.append(time.perf_counter() - start)
        for request in requests:
            if request.error is not None:
                raise request.error
        histories = [request.prompt + request.token_ids for request in requests]
    return seconds


def compare(engine: Engine, args: argparse.Namespace) -> None:
    sampler = engine.policy.sampler
    sampler._eos[:] = False  # both ways sample every token
    cached, whole, ratios = [], [], []
    limit = sampler._prefix_cache.max_bytes
    for number in range(args.pairs + 1):
        rounds = []
        for max_bytes in (limit, 0):
            sampler._prefix_cache.max_bytes = max_bytes
            before = sampler.stats()
            rounds.append(converse(engine, args, number))
            after, memory = sampler.stats(), sampler.stats().prefix_cache_bytes / 2**20
            sampler.call(sampler._prefix_cache.clear)
            if number == 0:
                computed = after.prefilled_tokens - before.prefilled_tokens
                reused = after.reused_tokens - before.reused_tokens
                name = "cached" if max_bytes else "whole"
                print(f"{name}: {computed} prompt tokens computed, {reused} reused, {memory:.1f} MiB cached")
        if number:  # the first pair warms up
            cached.append(rounds[0])
            whole.append(rounds[1])
            ratios.append(sum(rounds[1]) / sum(rounds[0]))
    for name, rows in (("cached", cached), ("whole", whole)):
        turns = "  ".join(f"{statistics.median(column):6.3f}" for column in zip(*rows, strict=True))
        print(f"{name:6s} seconds a turn {turns}   all {statistics.median(map(sum, rows)):6.3f}")
    print(f"whole / cached min {min(ratios):.2f}  median {statistics.median(ratios):.2f}  max {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--context", type=int, default=120, help="new tokens of context a turn")
    parser.add_argument("--new", type=int, default=16, help="tokens sampled a turn")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=SIZES["1.7m"]["hidden_size"])
    parser.add_argument("--layers", type=int, default=SIZES["1.7m"]["num_hidden_layers"])
    parser.add_argument("--memory", type=int, default=512, help="MiB of the prefix cache")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(describe())
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 8 // 3,
        "num_hidden_layers": args.layers,
    }
    with random_model({**SIZES["1.7m"], **sizes}) as folder:
        config = PolicyConfig(model=folder, max_num_seqs=args.episodes, kv_cache_mb=args.memory)
        with Engine.load(config, seed=0, device=args.device) as engine:
            print(
                f"{args.episodes} conversations in groups of {args.group}, {args.turns} turns of {args.context} + "
                f"{args.new} tokens, {engine.num_parameters:,} parameters"
            )
            compare(engine, args)


if __name__ == "__main__":
    main()
