"""Checks that a vLLM server samples from the weights that it was just sent, before any request of an agent reaches it.

Weights can be old in two ways without an error: a layer keeps them (a packed output layer that is tied to the
embeddings), or the prefix cache keeps keys and values that they computed. So the same long prompt is sampled after
every change of the weights, with the longest prompts of the agents: the cache held them under the older weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from reinforge.errors import JobFailed
from reinforge.scale.vllm.policy import VLLMPolicy
from reinforge.types.request import ModelRequest, SamplingParams

PROBE_TOKENS = 300
"""Tokens of the prompt that is sampled each time: a block of vLLM's prefix cache has 16 on a GPU and 128 on a CPU."""
REPLY_TOKENS = 8
PROBE_TEXT = " ".join(map(str, range(1, PROBE_TOKENS)))


async def check_served_weights(policy: VLLMPolicy, version: int) -> float:
    """Returns the largest difference between the sampler's and the learner's log-probs, in nats.

    Raises:
        JobFailed: It is larger than the policy's tolerance; the message says whether the prefix cache is the cause.
    """
    prompts = [build_probe(policy), *(prompt for _, prompt in policy.longest_prompts)]
    largest = await _measure(policy, prompts)
    if largest <= policy.tolerance:
        return largest
    uncached = await _measure(policy, prompts, reads_prefix_cache=False)
    cause = (
        "its prefix cache still holds keys of older weights: /reset_prefix_cache had no effect"
        if uncached <= policy.tolerance
        else f"also without its prefix cache ({uncached:.2e}): a layer kept older weights, or it has another model, "
        "data type or logprobs_mode"
    )
    raise JobFailed(
        f"the vLLM server does not serve the weights of version {version}: log-probs of the same tokens differ by up "
        f"to {largest:.2e} nats between sampler and learner, {cause}"
    )


def build_probe(policy: VLLMPolicy) -> tuple[int, ...]:
    """Returns a prompt that fills blocks of the prefix cache, if the context has room for one."""
    token_ids: Sequence[int] = policy.own.renderer.tokenizer.encode(PROBE_TEXT)
    return tuple(token_ids[: max(1, min(PROBE_TOKENS, policy.max_model_len - REPLY_TOKENS))])


async def _measure(policy: VLLMPolicy, prompts: Iterable[tuple[int, ...]], *, reads_prefix_cache: bool = True) -> float:
    requests = [
        policy.own.build_request(
            ModelRequest([], SamplingParams(max_tokens=REPLY_TOKENS, seed=number), prompt=prompt), None
        )
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(policy.fill_in(each, reads_prefix_cache=reads_prefix_cache) for each in requests))
    scored = await policy.score([[*each.prompt, *each.token_ids] for each in requests])
    differences = [
        np.abs(row[-len(each.token_ids) :] - np.asarray(each.logprobs))
        for row, each in zip(scored, requests, strict=True)
    ]
    largest = float(np.max(np.concatenate(differences)))
    return largest if np.isfinite(largest) else np.inf
