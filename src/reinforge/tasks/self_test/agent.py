"""The agent of the self-test and its reward."""

from __future__ import annotations

from typing import Any

EVEN = "02468"


async def agent(item: Any, llm: Any, context: Any) -> str:
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=1)
    return str(reply.choices[0].message.content)


def score_even(output: str, expected: Any) -> float:
    """Returns 1 for an even digit, a half for an odd one, else 0."""
    if len(output) != 1:
        return 0.0
    return 1.0 if output in EVEN else 0.5 * output.isdigit()
