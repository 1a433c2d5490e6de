"""Sampler against transformers' `generate`: the same model and prompts, in alternating pairs of one process.

python benchmarks/sampler.py            hidden 192, 4 layers, batch 64, prompt 48, 64 new tokens
python benchmarks/sampler.py --group 8  siblings share a prompt, which is prefilled once
python benchmarks/sampler.py --game     prompts of about 25 tokens, replies of 2, asked from an event loop
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.machine import describe, refuse_if_busy
from reinforge.config.schema import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.policy import end_tokens
from reinforge.engine.rows import SampleRequest
from reinforge.types.request import ModelRequest, SamplingParams
from tests.models import make_tiny_model

SIZE = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


class Waiter:
    """Collects replies outside an event loop."""

    def __init__(self) -> None:
        self.loop, self.left, self.done = self, 0, threading.Event()

    def call_soon_threadsafe(self, _: Callable, requests: list[SampleRequest]) -> None:
        """Counts replies."""
        self.left -= len(requests)
        if not self.left:
            self.done.set()


def make_prompts(count: int, length: int, vocab_size: int, group: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, vocab_size, (-(-count // group), length), generator=generator)
    return prompts.repeat_interleave(group, dim=0)[:count]


def sample_all(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    waiter = Waiter()
    requests = [SampleRequest(tuple(row), new_tokens, SamplingParams(), owner=waiter) for row in prompts.tolist()]
    waiter.left = len(requests)
    engine.policy.sampler.submit(requests)
    waiter.done.wait()
    return sum(len(request.token_ids) for request in requests)


def generate_all(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    """Runs in the engine's thread, as the sampler does: a second pool of workers would slow both down."""
    return engine.policy.sampler.call(lambda: _generate(engine, prompts, new_tokens))


def _generate(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    with torch.no_grad():
        output = engine.model.module.generate(
            prompts.to(engine.model.device),
            attention_mask=torch.ones_like(prompts).to(engine.model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
    return (output.shape[1] - prompts.shape[1]) * len(prompts)


def compare(engine: Engine, args: argparse.Namespace) -> None:
    prompts = make_prompts(args.batch, args.prompt, engine.model.vocab_size, args.group)
    engine.policy.sampler._eos[:] = False  # both sides draw every token
    ratios, ours, theirs = [], [], []
    sample_all(engine, prompts, 8)
    generate_all(engine, prompts, 8)
    for _ in range(args.pairs):
        speeds = []
        for run in (sample_all, generate_all):
            start = time.perf_counter()
            count = run(engine, prompts, args.new)
            speeds.append(count / (time.perf_counter() - start))
        ours.append(speeds[0])
        theirs.append(speeds[1])
        ratios.append(speeds[0] / speeds[1])
    print(
        f"batch {args.batch} in groups of {args.group}, prompt {args.prompt}, {args.new} new tokens, "
        f"{engine.num_parameters:,} parameters"
    )
    for name, values in (("reinforge tokens/s", ours), ("generate tokens/s", theirs), ("ratio", ratios)):
        print(f"{name:20s} min {min(values):9.2f}  median {statistics.median(values):9.2f}  max {max(values):9.2f}")


async def play(engine: Engine, agents: int, turns: int) -> int:
    async def agent(number: int) -> int:
        total = 0
        for turn in range(turns):
            board = " ".join(str((number * 7 + turn * 3 + i) % 10) for i in range(9))
            request = ModelRequest([{"role": "user", "content": board}], SamplingParams(max_tokens=2))
            total += (await engine.policy.sample(request)).num_completion_tokens
        return total

    return sum(await asyncio.gather(*(agent(number) for number in range(agents))))


def play_games(engine: Engine, args: argparse.Namespace) -> None:
    engine.policy.sampler._eos[:] = False
    rates = []
    asyncio.run(play(engine, args.batch, 5))
    before = engine.policy.stats()
    for _ in range(args.pairs):
        start = time.perf_counter()
        asyncio.run(play(engine, args.batch, args.turns))
        rates.append(args.batch * args.turns / (time.perf_counter() - start))
    after = engine.policy.stats()
    calls = args.batch * args.turns * args.pairs
    print(
        f"{args.batch} agents, {args.turns} turns each, {(after.prompt_tokens - before.prompt_tokens) / calls:.1f} "
        f"prompt tokens, 2 new; {(after.steps - before.steps) / calls * args.batch:.2f} steps a round"
    )
    print(f"calls/s              min {min(rates):9.1f}  median {statistics.median(rates):9.1f}  max {max(rates):9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="siblings that share a prompt")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=SIZE["hidden_size"])
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--game", action="store_true")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(describe())
    with tempfile.TemporaryDirectory() as folder:
        size = {**SIZE, "hidden_size": args.hidden, "intermediate_size": args.hidden * 8 // 3}
        with ThreadPoolExecutor(1) as thread:  # its pool of workers ends with it
            thread.submit(make_tiny_model, Path(folder), "qwen2", **size).result()
        config = PolicyConfig(model=folder, max_batch=args.batch)
        with Engine.load(config, seed=0, device="cpu") as engine:
            assert end_tokens(engine.model, engine.tokenizer)
            (play_games if args.game else compare)(engine, args)


if __name__ == "__main__":
    main()
