"""The sampler against transformers' `generate`: same model and prompts, in alternating pairs of one process.

python benchmarks/sampler.py              hidden 192, 4 layers, batch 64, prompt 48, 64 new tokens
python benchmarks/sampler.py --group 8    siblings share a prompt, which is computed once
python benchmarks/sampler.py --size 135m  random weights in the shape of SmolLM-135M
python benchmarks/sampler.py --batched    also against transformers' continuous batching, `generate_batch`
python benchmarks/sampler.py --game       prompts of about 25 tokens, replies of 2, requested by an event loop
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.machine import describe, matmul_gflops, refuse_if_busy
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.policy import find_end_tokens
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.engine.sampling.sampler import PREFILL_TOKENS
from reinforge.types.request import ModelRequest, SamplingParams
from tests.models import make_tiny_model

PAGE_TOKENS = 32
"""Tokens per page of `generate_batch`'s cache: its default of 256 is more than a prompt and its reply."""

SIZES: dict[str, dict[str, Any]] = {
    "1.7m": {
        "family": "qwen2",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 320,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "135m": {
        "family": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    },
}


@contextmanager
def random_model(size: dict[str, Any]) -> Iterator[str]:
    """Yields the folder of a model with random weights, made in a thread whose pool of workers ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(make_tiny_model, Path(folder), **size).result()
        yield folder


class Waiter:
    """Collects replies outside an event loop."""

    def __init__(self) -> None:
        self.loop, self.left, self.done = self, 0, threading.Event()

    def call_soon_threadsafe(self, _: Callable, requests: list[SampleRequest]) -> None:
        """Counts replies."""
        self.left -= len(requests)
        if not self.left:
            self.done.set()


def make_prompts(count: int, length: int, vocab_size: int, group: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(10, vocab_size, (-(-count // group), length), generator=generator)
    return prompts.repeat_interleave(group, dim=0)[:count]


def sample_all(engine: Engine, prompts: torch.Tensor | list[list[int]], new_tokens: int) -> int:
    """Samples a reply to each prompt, by the engine's adapters in turn."""
    waiter, adapters = Waiter(), list(engine.policies)
    rows = prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts
    requests = [
        SampleRequest(tuple(row), new_tokens, SamplingParams(), owner=waiter, adapter=adapters[number % len(adapters)])
        for number, row in enumerate(rows)
    ]
    waiter.left = len(requests)
    engine.policy.sampler.submit(requests)
    waiter.done.wait()
    return sum(len(request.token_ids) for request in requests)


def generate_all(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    """Generates in the engine's thread, as the sampler does: a second pool of workers would slow both down."""
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


def generate_batch_all(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    """Generates while the engine's thread waits; transformers starts its own thread."""
    return engine.policy.sampler.call(lambda: _generate_batch(engine, prompts, new_tokens))


def _generate_batch(engine: Engine, prompts: torch.Tensor, new_tokens: int) -> int:
    module, ours = engine.model.module, engine.model.attn_implementation
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        eos_token_id=-1,  # no end token: every token is sampled
        pad_token_id=0,
    )
    pages = len(prompts) * -(-(prompts.shape[1] + new_tokens) // PAGE_TOKENS)
    batching = ContinuousBatchingConfig(  # its defaults take all free memory for the cache, and look for flash kernels
        page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=PREFILL_TOKENS, auto_switch_to_flash=False
    )
    module.set_attn_implementation("sdpa")  # it accepts no custom attention function
    try:
        outputs = module.generate_batch(
            prompts.tolist(), generation_config=sampling, continuous_batching_config=batching, warmup=False
        )
    finally:
        module.set_attn_implementation(ours)
    return sum(len(output.generated_tokens) for output in outputs.values())


def count_flops(engine: Engine, args: argparse.Namespace) -> float:
    """Returns the operations of all matrix products with weights in one run; attention is not counted.

    Example: 1 prompt of 48 tokens, 64 new: 48 + 63 tokens pass the layers, and the head makes 64 rows of logits.
    """
    head = engine.model.vocab_size * engine.model.config.hidden_size
    layers = sum(layer.weight.numel() for layer in engine.model.base.modules() if isinstance(layer, torch.nn.Linear))
    prompt_tokens = -(-args.batch // args.group) * args.prompt
    return 2.0 * (layers * (prompt_tokens + args.batch * (args.new - 1)) + head * args.batch * args.new)


def compare(engine: Engine, args: argparse.Namespace) -> None:
    prompts = make_prompts(args.batch, args.prompt, engine.model.vocab_size, args.group)
    engine.policy.sampler._eos[:] = False  # both sides sample every token
    ways: dict[str, Callable[[Engine, torch.Tensor, int], int]] = {"reinforge": sample_all, "generate": generate_all}
    if args.batched:
        ways["generate_batch"] = generate_batch_all
    for run in ways.values():
        run(engine, prompts, min(8, args.new))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    shares: list[float] = []
    needed = count_flops(engine, args) / (args.batch * args.new)
    for number in range(args.pairs):
        peak = matmul_gflops(seconds=0.2) * 1e9
        # fresh prompts: the sampler caches the ones it has computed
        prompts = make_prompts(args.batch, args.prompt, engine.model.vocab_size, args.group, seed=number + 1)
        for name, run in ways.items():
            start = time.perf_counter()
            count = run(engine, prompts, args.new)
            speeds[name].append(count / (time.perf_counter() - start))
        shares.append(100 * speeds["reinforge"][-1] * needed / peak)
    print(
        f"batch {args.batch} in groups of {args.group}, prompt {args.prompt}, {args.new} new tokens, "
        f"{engine.num_parameters:,} parameters, {args.pairs} pairs"
    )
    for name, values in speeds.items():
        show(f"{name} tokens/s", values)
    for name in list(ways)[1:]:
        show(
            f"ratio to {name}", [ours / theirs for ours, theirs in zip(speeds["reinforge"], speeds[name], strict=True)]
        )
    show("% of matmul peak", shares)


def show(name: str, values: list[float]) -> None:
    print(f"{name:24s} min {min(values):9.2f}  median {statistics.median(values):9.2f}  max {max(values):9.2f}")


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
    parser.add_argument("--size", choices=SIZES, default="1.7m")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the one of --size")
    parser.add_argument("--batched", action="store_true", help="also compare with generate_batch")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--game", action="store_true")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(describe())
    size = dict(SIZES[args.size])
    if args.hidden:
        size |= {"hidden_size": args.hidden, "intermediate_size": args.hidden * 8 // 3}
    with random_model(size) as folder:
        config = PolicyConfig(model=folder, max_num_seqs=args.batch)
        with Engine.load(config, seed=0, device="cpu") as engine:
            assert find_end_tokens(engine.model, engine.tokenizer)
            (play_games if args.game else compare)(engine, args)


if __name__ == "__main__":
    main()
