"""Server-sent events, and a finished reply in the pieces in which a stream sends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's chat and text completions."""
_PIECE = re.compile(r"\s*\S{1,24}|\s+")


def encode_event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    r"""Returns one server-sent event.

    Example: `encode_event({"a": 1}, "ping")` -> `b'event: ping\ndata: {"a":1}\n\n'`.
    """
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def split_text(text: str) -> Iterator[str]:
    """Yields a text in pieces of about a word each, which joined are the text.

    Example: "a reply of five words" -> "a", " reply", " of", " five", " words".
    """
    return (found[0] for found in _PIECE.finditer(text))
