"""Counters of the sampler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What the sampler has done so far and holds now.

    Attributes:
        sampled_tokens: Tokens sampled.
        prompt_tokens: Prompt tokens of the replies begun.
        prefilled_tokens: Prompt tokens computed; fewer than `prompt_tokens` where prompts were equal or in the prefix
            cache.
        reused_tokens: Prompt tokens found in the prefix cache; equal prompts count once.
        prefix_cache_bytes: Memory of the prefix cache.
        steps: Decode steps.
        running, waiting: Replies in the running batch, and requests that wait for a slot.
    """

    sampled_tokens: int
    prompt_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    prefix_cache_bytes: int
    steps: int
    running: int
    waiting: int
