"""Proof that the name the agent calls serves the weights that were just trained.

The best-known harness of this kind trained an adapter that its rollouts never used; nothing said so. After every
job a few replies are drawn through the sampler and scored again by the learner: their log-probs must agree within the
policy's tolerance, or else a measured noise floor, the replies must carry the new version, and the weights'
fingerprint must be a new one. A policy that tells no tokens cannot be scored: there the version and the fingerprint are
all, and the figures are unknown. Of several adapters each is asked, with prompts of its own.
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
"""Sampler and learner may differ by the policy's tolerance, or by so many times the noise of scoring twice."""

NUM_CANARY_PROMPTS = 4
CANARY_CHARACTERS = 2000
"""Further prompts are asked while all together are no longer than this: the check is to cost little of a job."""
PROBE_TOKENS = 4
PROBE: list[Message] = [{"role": "user", "content": "1 2 3"}]
"""Asked where no prompt of the agent's is known yet."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What the canary saw.

    Attributes:
        version: Version that every reply carried.
        fingerprint: Of the weights that are served.
        max_difference: Largest |sampler - learner| log-prob, in nats; None: no token was compared.
        mean_difference: Mean of the same, or None.
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
"""A few histories that the agent asked, by the adapter that it asked; those of the one policy stand under ""."""


async def probe(policy: PolicyServer, version: int, prompts: Prompts, previous_fingerprint: str | None) -> CanaryReport:
    """Checks that the policy serves `version`, with weights other than before, by each of its adapters.

    Args:
        policy: What the agent calls.
        version: The version that was published.
        prompts: Short ones are cheap.
        previous_fingerprint: Of the weights before the job; None: nothing to compare with.

    Raises:
        JobFailed: The weights did not change, or the sampler serves others than the learner's.
    """
    fingerprint = await policy.fingerprint()
    if fingerprint == previous_fingerprint:
        raise JobFailed(
            f"the job changed nothing: the weights still have the fingerprint {fingerprint}; "
            "the learning rate may be zero or too small for the weights' precision"
        )
    asked = [
        await _compare(policy.named(name) if name else policy, name, version, prompts.get(name, []))
        for name in policy.names or ("",)
    ]
    found = [each for each in asked if each is not None]
    d_N = np.concatenate(found) if found else np.zeros(0)
    if not len(d_N):  # nothing was compared, which is no agreement of 0.0
        return CanaryReport(version, fingerprint, None, None, None, 0)
    distances_N, k3_N = np.abs(d_N), np.expm1(d_N) - d_N
    return CanaryReport(
        version, fingerprint, float(distances_N.max()), float(distances_N.mean()), float(k3_N.mean()), len(d_N)
    )


async def _compare(
    policy: PolicyServer, name: str, version: int, prompts: Sequence[list[Message]]
) -> NDArray[np.float64] | None:
    """Returns learner minus sampler for each token of a few replies, in nats; None: no tokens.

    Raises:
        JobFailed: They differ by more than that explains, or the replies are of another version.
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
    if largest <= policy.tolerance:
        return d_N
    again = await policy.score(sequences[:1])
    noise = max((float(np.max(np.abs(a - b))) for a, b in zip(once, again, strict=False)), default=0.0)
    if not largest <= NOISE_FACTOR * noise:  # NaN is no agreement
        by = f" by the adapter {name}" if name else ""
        raise JobFailed(
            f"the agent is not served the weights that were trained{by}: log-probs of the same tokens differ by up to "
            f"{largest:.2e} nats between sampler and learner, with a noise floor of {noise:.1e}"
        )
    return d_N


def _refuse_other_version(replies: Sequence[ModelReply], version: int) -> None:
    served = {reply.version for reply in replies if reply.version is not None}
    if served - {version}:
        raise JobFailed(f"version {version} was published, but replies carry version {sorted(served)}")


def prompts_of(groups: Iterable[TrajectoryGroup]) -> dict[str, list[list[Message]]]:
    """Returns prompts for the canary by adapter."""
    parts: dict[str, list[TrajectoryGroup]] = {}
    for group in groups:
        parts.setdefault(group.model_group or "", []).append(group)
    return {name: short_prompts(part) for name, part in parts.items()}


def short_prompts(groups: list[TrajectoryGroup]) -> list[list[Message]]:
    """Returns the shortest opening histories among a job's trajectories, for the canary."""
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
