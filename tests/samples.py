"""Training samples and requests for tests of the engine."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory


def request(text: str = "hello", num_top_logprobs: int = 0, **params: Any) -> ModelRequest:
    sampling = SamplingParams(**{"max_tokens": 12, **params})
    return ModelRequest([{"role": "user", "content": text}], sampling, num_top_logprobs=num_top_logprobs)


def ask(policy: Any, requests: Sequence[ModelRequest], *, return_exceptions: bool = False) -> list[ModelReply]:
    """Samples all requests at once and returns the replies, with the errors in their places or raised."""

    async def gather() -> list[ModelReply]:
        replies = (policy.sample(request) for request in requests)
        return list(await asyncio.gather(*replies, return_exceptions=return_exceptions))

    return asyncio.run(gather())


def outcomes(engine: Any, *requests: ModelRequest) -> list[ModelReply]:
    return ask(engine.policy, requests, return_exceptions=True)


class Waiter:
    """Stand-in for the event loop of callers that submit requests straight to the sampler."""

    def __init__(self, count: int):
        self.loop, self.left, self.done = self, count, threading.Event()

    def call_soon_threadsafe(self, _: Any, requests: Sequence[SampleRequest]) -> None:
        """Counts the replies."""
        self.left -= len(requests)
        if not self.left:
            self.done.set()


def sample_replies(
    engine: Any,
    prompts: Sequence[tuple[int, ...]],
    limit: int = 16,
    seeds: Sequence[int] = (),
    adapters: Sequence[str] = (),
) -> list[SampleRequest]:
    """Samples a reply to each prompt (token ids), all at once; seeds default to 0, 1, ..."""
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


def make_sample(tokens: TokenLogprobs, advantage: float = 1.0, weight: float = 1.0) -> TrainingSample:
    """A sample that trains every token of one reply."""
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
        samples.append(make_sample(tokens, float(rng.normal()), float(rng.uniform(0.2, 2))))
    return samples


def sibling_samples(
    seed: int = 0, vocab_size: int = 320, stem: int = 0, sizes: Sequence[int] = (6, 1, 3, 4, 1, 2)
) -> list[TrainingSample]:
    """Groups of siblings with prompts of 3 to 20 tokens and replies of 1 to 7; some have a second turn.

    The prompts start with `stem` shared tokens: one stem for the first three groups, another for the rest.
    """
    rng = np.random.default_rng(seed)
    stems = rng.integers(6, vocab_size, (2, stem)).tolist()
    samples = []
    for family, size in enumerate(sizes):
        prompt = (*stems[family // 3], *rng.integers(6, vocab_size, rng.integers(3, 20)).tolist())
        for number in range(size):
            reply = tuple(rng.integers(6, vocab_size, rng.integers(1, 8)).tolist())
            tokens = TokenLogprobs(prompt, reply, (-5.0,) * len(reply), temperature=float(rng.choice([0.7, 1.0])))
            sample = make_sample(tokens, float(rng.normal()), float(rng.uniform(0.2, 2)))
            if number == 2 and len(reply) > 2:  # a second turn: the token between is not the model's
                sample.loss_mask[len(prompt) + 1] = False
            samples.append(sample)
    return [samples[i] for i in rng.permutation(len(samples))]


def trained_samples(tokens: TokenLogprobs, reward: float = 1.0) -> list[TrainingSample]:
    """The samples of a trajectory with one reply, including its supports."""
    turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens)
    return samples_from_trajectory(Trajectory(episode=[turn], reward=reward))


@contextmanager
def hold_steps(engine: Any) -> Iterator[threading.Event]:
    """Holds the sampler's thread before its first decode step with a running reply until the block ends.

    The event is set once the thread is held. A step without replies, such as the one that follows an earlier test's
    last reply, is not held: the thread must be able to admit the request that the test sends.
    """
    sampler = engine.policy.sampler
    held, released, step = threading.Event(), threading.Event(), sampler._step

    def held_step() -> None:
        if sampler._batch.count:
            held.set()
            released.wait()
        step()

    sampler._step = held_step
    try:
        yield held
    finally:
        del sampler._step
        released.set()
