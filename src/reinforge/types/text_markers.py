"""Text that arrives in pieces, and the markers that may begin in one piece and end in the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def count_held(text: str, markers: Iterable[str]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a marker.

    Example: `count_held("a <tool", ("<tool_call>",))` -> 5; `count_held("a < b", ("<tool_call>",))` -> 0.

    Args:
        text: The text so far, in which no marker is whole.
    """
    held = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), held, -1):
            if text.endswith(marker[:length]):
                held = length
                break
    return held


def find_marker(text: str, markers: Sequence[str]) -> int:
    return min((place for marker in markers if (place := text.find(marker)) >= 0), default=-1)
