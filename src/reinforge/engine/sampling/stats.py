"""What the sampler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """What the sampler has done and holds.

    Attributes:
        sampled_tokens: Tokens drawn.
        prompt_tokens: Prompt tokens of the replies begun.
        prefilled_tokens: Prompt tokens computed; fewer, where prompts were equal or went on from what was kept.
        reused_tokens: Prompt tokens whose keys and values had been kept; of equal prompts, those of one.
        kept_bytes: Keys and values kept now, for the next turns of conversations.
        steps: Decode forwards.
        running, waiting: Replies in slots, and requests that wait for one.
    """

    sampled_tokens: int
    prompt_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    kept_bytes: int
    steps: int
    running: int
    waiting: int
