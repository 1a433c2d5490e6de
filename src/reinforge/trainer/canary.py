"""Checks after each job that the policy serves the weights that were just trained.

A run can train an adapter that its rollouts never use, without any error. So after every job a few replies are sampled
and then scored by the learner: the log-probs must agree within the policy's tolerance or a measured noise floor, the
replies must carry the new version, and the fingerprint of the weights must be new. A policy that does not expose tokens
cannot be scored; there only version and fingerprint are checked, and the differences stay unknown. Several adapters are
checked one by one, each with its own prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reinforge.errors import JobFailed
from reinforge.interfaces import PolicyServer
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams
from reinforge.types.trajectory import EpisodeItem, TrajectoryGroup

NOISE_FACTOR = 10.0
"""Sampler and learner may differ by the policy's tolerance, or by this many times the noise of scoring twice."""

MAX_OUTLIER = 1e-2
OUTLIER_SHARE = 1 / 8
"""This share of the tokens may differ by `MAX_OUTLIER` nats: other weights change nearly every token. Where attention
hangs between two keys with large scores, though, float32 may round one token differently: with a learning rate of 30
times the default, 7e-5 nats were seen in one of 15,000 replies, of which 99 % agreed to 1e-6."""

NUM_CANARY_PROMPTS = 4
CANARY_CHARACTERS = 2000
"""Maximum number of characters of all prompts together, so that the check takes a small share of a job."""
PROBE_TOKENS = 4
PROBE: list[Message] = [{"role": "user", "content": "1 2 3"}]
"""The prompt if none of the agent's is known yet."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What the canary measured.

    Attributes:
        version: The version that every reply carried.
        fingerprint: Fingerprint of the served weights.
        max_difference: Largest |sampler - learner| log-prob, in nats; None: no token was compared.
        mean_difference: Mean |sampler - learner| log-prob; None as above.
        k3: Estimate of KL(sampler, learner) per token in nats: the mean of exp(d) - 1 - d with d = learner - sampler
            (Schulman, "Approximating KL divergence", 2020); None as above.
        num_tokens: Tokens compared.
    """

    version: int
    fingerprint: str
    max_difference: float | None
    mean_difference: float | None
    k3: float | None
    num_tokens: int


Prompts = Mapping[str, Sequence[list[Message]]]
"""A few of the agent's conversations by adapter; a single policy has the name ""."""


async def probe(policy: PolicyServer, version: int, prompts: Prompts, previous_fingerprint: str | None) -> CanaryReport:
    """Checks that the policy and each of its adapters serve `version`, with new weights.

    Args:
        prompts: Prompts to sample from; short ones are cheap.
        previous_fingerprint: Fingerprint of the weights before the job; None: unknown.

    Raises:
        JobFailed: The weights did not change, or the sampler serves other weights than the learner's.
    """
    fingerprint = await policy.fingerprint()
    if fingerprint == previous_fingerprint:
        raise JobFailed(
            f"the job did not change the weights (fingerprint {fingerprint}); the learning rate may be zero, "
            "or too small for the precision of the weights"
        )
    results = [
        await _compare(policy.get_policy(name) if name else policy, name, version, prompts.get(name, []))
        for name in policy.names or ("",)
    ]
    found = [each for each in results if each is not None]
    d_N = np.concatenate(found) if found else np.zeros(0)
    if not len(d_N):  # nothing was compared: unknown, not 0.0
        return CanaryReport(version, fingerprint, None, None, None, 0)
    distances_N, k3_N = np.abs(d_N), np.expm1(d_N) - d_N
    return CanaryReport(
        version, fingerprint, float(distances_N.max()), float(distances_N.mean()), float(k3_N.mean()), len(d_N)
    )


async def _compare(
    policy: PolicyServer, name: str, version: int, prompts: Sequence[list[Message]]
) -> NDArray[np.float64] | None:
    """Returns learner minus sampler log-prob of each token of a few replies, in nats; None: no tokens are known.

    Raises:
        JobFailed: They differ by more than the noise, or the replies carry another version.
    """
    requests = [
        ModelRequest(list(messages), SamplingParams(max_tokens=PROBE_TOKENS, seed=index + 1))
        for index, messages in enumerate(prompts or [PROBE])
    ]
    replies = await asyncio.gather(*(policy.sample(request) for request in requests))
    _refuse_other_version(replies, version)
    if all(reply.tokens is None for reply in replies):
        return None
    sequences = [[*r.tokens.prompt_token_ids, *r.tokens.token_ids] for r in replies if r.tokens]
    once = await policy.score(sequences)
    differences = [
        scored[-len(r.tokens.token_ids) :] - np.asarray(r.tokens.logprobs)
        for scored, r in zip(once, (r for r in replies if r.tokens), strict=True)
        if r.tokens and r.tokens.token_ids
    ]
    d_N = np.concatenate(differences, dtype=np.float64) if differences else np.zeros(0)
    largest = float(np.abs(d_N).max(initial=0.0))
    if largest <= policy.tolerance or _are_outliers(np.abs(d_N), policy.tolerance):
        return d_N
    again = await policy.score(sequences[:1])
    noise = max((float(np.max(np.abs(a - b))) for a, b in zip(once, again, strict=False)), default=0.0)
    if not largest <= NOISE_FACTOR * noise:  # NaN fails too
        of = f" of the adapter {name}" if name else ""
        raise JobFailed(
            f"the policy does not serve the trained weights{of}: log-probs of the same tokens differ by up to "
            f"{largest:.2e} nats between sampler and learner (noise floor {noise:.1e})"
        )
    return d_N


def _are_outliers(distances_N: NDArray[np.float64], tolerance: float) -> bool:
    num_beyond = np.count_nonzero(~(distances_N <= tolerance))
    return bool(distances_N.max() <= MAX_OUTLIER and num_beyond <= OUTLIER_SHARE * len(distances_N))


def _refuse_other_version(replies: Sequence[ModelReply], version: int) -> None:
    served = {reply.version for reply in replies if reply.version is not None}
    if served - {version}:
        raise JobFailed(f"version {version} was published, but replies carry version {sorted(served)}")


def pick_prompts(groups: Iterable[TrajectoryGroup]) -> dict[str, list[list[Message]]]:
    """Returns prompts for the canary, by adapter."""
    parts: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        parts.setdefault(group.model_group or "", []).append(group)
    return {name: shortest_prompts(part) for name, part in parts.items()}


def shortest_prompts(groups: list[TrajectoryGroup]) -> list[list[Message]]:
    """Returns the shortest prompts of a job's trajectories: everything before the first assistant turn."""
    openings: dict[str, list[Message]] = {}
    for group in groups:
        opening: list[Message] = []
        for item in group.trajectories[0].episode:
            if not isinstance(item, EpisodeItem) or item.role == "assistant":
                break
            opening.append({"role": item.role.value, "content": item.content})
        if opening:
            openings[str(opening)] = opening
    chosen: list[list[Message]] = []
    left = CANARY_CHARACTERS
    for messages in sorted(openings.values(), key=lambda messages: len(str(messages)))[:NUM_CANARY_PROMPTS]:
        left -= len(str(messages))
        if chosen and left < 0:
            break
        chosen.append(messages)
    return chosen
