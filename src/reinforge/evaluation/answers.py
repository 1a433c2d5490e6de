"""Parses the answers of models as JSON, with limits: no answer takes long or raises anything but a ValueError."""

from __future__ import annotations

from typing import Any

from reinforge.bounded import decode_json
from reinforge.files import find_unwritable


class UnusableOutputError(Exception):
    """The agent's output cannot be scored because of what it is; the answer is wrong, its score is not missing."""


def parse_answer(value: Any, *, allow_fence: bool = False) -> Any:
    """Returns the value of a JSON string; other values are returned unchanged.

    `allow_fence` also accepts JSON inside one ``` block with nothing around it.
    """
    if value is None:
        raise ValueError("the agent returned nothing")
    if isinstance(value, str):
        return decode_json(strip_fence(value) if allow_fence else value)
    if (why := find_unwritable(value, finite=True)) is not None:
        raise ValueError(why)
    return value


def strip_fence(text: str) -> str:
    """Returns the content of a ``` or ```json block with nothing around it; other strings are returned unchanged."""
    block = text.strip()
    first, line_break, rest = block.partition("\n")
    if not line_break or not rest.endswith("```") or first.rstrip(" \t") not in ("```", "```json"):
        return text
    return rest.removesuffix("```")
