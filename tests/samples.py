"""Training samples and requests for the engine's tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from reinforge.algorithms.samples import to_samples
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory


def request(text: str = "hello", **params: Any) -> ModelRequest:
    """A request of one user message."""
    return ModelRequest([{"role": "user", "content": text}], SamplingParams(**{"max_tokens": 12, **params}))


def ask(policy: Any, requests: Sequence[ModelRequest]) -> list[ModelReply]:
    """Asks all at once and waits for the replies."""

    async def gather() -> list[ModelReply]:
        return list(await asyncio.gather(*(policy.sample(request) for request in requests)))

    return asyncio.run(gather())


class Waiter:
    """Stands for a loop whose callers wait for requests given straight to the sampler."""

    def __init__(self, count: int):
        self.loop, self.left, self.done = self, count, threading.Event()

    def call_soon_threadsafe(self, _: Any, requests: Sequence[SampleRequest]) -> None:
        """Counts replies."""
        self.left -= len(requests)
        if not self.left:
            self.done.set()


def draw(
    engine: Any,
    prompts: Sequence[tuple[int, ...]],
    limit: int = 16,
    seeds: Sequence[int] = (),
    adapters: Sequence[str] = (),
) -> list[SampleRequest]:
    """Draws a reply to each prompt, given as tokens, all at once; seeds are 0, 1, ... unless given."""
    waiter = Waiter(len(prompts))
    requests = [
        SampleRequest(prompt, limit, SamplingParams(seed=seed), adapter=adapter, owner=waiter)
        for prompt, seed, adapter in zip(
            prompts, seeds or range(len(prompts)), adapters or ["default"] * len(prompts), strict=True
        )
    ]
    engine.policy.sampler.submit(requests)
    assert waiter.done.wait(60)
    assert [request.error for request in requests] == [None] * len(requests)
    return requests


def sample_of(tokens: TokenLogprobs, advantage: float = 1.0, weight: float = 1.0) -> TrainingSample:
    """One reply as a sample that trains every sampled token."""
    prompt, reply = tokens.prompt_token_ids, tokens.token_ids
    mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask] = tokens.logprobs
    return TrainingSample(
        token_ids=np.array(prompt + reply),
        loss_mask=mask,
        sampling_logprobs=logprobs,
        temperatures=np.where(mask, tokens.temperature, 1.0).astype(np.float32),
        policy_versions=np.where(mask, tokens.policy_version, -1),
        turn_ids=np.where(mask, 0, -1),
        weight=weight,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
    )


def random_samples(count: int, seed: int = 0, vocab_size: int = 320) -> list[TrainingSample]:
    """Samples of different lengths, weights and advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt, reply = (tuple(rng.integers(6, vocab_size, rng.integers(2, 12)).tolist()) for _ in range(2))
        logprobs = tuple(rng.uniform(-6, -5, len(reply)).tolist())
        tokens = TokenLogprobs(prompt, reply, logprobs, temperature=float(rng.choice([0.7, 1.0])))
        samples.append(sample_of(tokens, float(rng.normal()), float(rng.uniform(0.2, 2))))
    return samples


def sibling_samples(
    seed: int = 0, vocab_size: int = 320, stem: int = 0, sizes: Sequence[int] = (6, 1, 3, 4, 1, 2)
) -> list[TrainingSample]:
    """Families of siblings with prompts of 3 to 20 tokens and replies of 1 to 7; some train a later turn.

    Before their prompts stand `stem` tokens: the same ones for the first three families, and for the others.
    """
    rng = np.random.default_rng(seed)
    stems = rng.integers(6, vocab_size, (2, stem)).tolist()
    samples = []
    for family, size in enumerate(sizes):
        prompt = (*stems[family // 3], *rng.integers(6, vocab_size, rng.integers(3, 20)).tolist())
        for number in range(size):
            reply = tuple(rng.integers(6, vocab_size, rng.integers(1, 8)).tolist())
            tokens = TokenLogprobs(prompt, reply, (-5.0,) * len(reply), temperature=float(rng.choice([0.7, 1.0])))
            sample = sample_of(tokens, float(rng.normal()), float(rng.uniform(0.2, 2)))
            if number == 2 and len(reply) > 2:  # a second turn: the token between was said by somebody else
                sample.loss_mask[len(prompt) + 1] = False
            samples.append(sample)
    return [samples[i] for i in rng.permutation(len(samples))]


def trained_samples(tokens: TokenLogprobs, reward: float = 1.0) -> list[TrainingSample]:
    """One reply on its way from a trajectory, supports included: what an algorithm would train."""
    turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens)
    return to_samples(Trajectory(episode=[turn], reward=reward))


def hold_steps(engine, monkeypatch):
    """Stops the sampler's thread ahead of each decode step until the second event is set; the first says it stands."""
    held, gate, step = threading.Event(), threading.Event(), engine.policy.sampler._step

    def held_step():
        held.set()
        gate.wait(10)
        step()

    monkeypatch.setattr(engine.policy.sampler, "_step", held_step)
    return held, gate
