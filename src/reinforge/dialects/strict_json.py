"""Decodes JSON that a model wrote, within limits that every later reader of the value can rely on.

Python's own decoder accepts more than JSON (NaN, Infinity, 1e400, duplicate keys), and fails on some texts with errors
that are not JSON errors: RecursionError for deep nesting, a plain ValueError for an integer of 5,000 digits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

MAX_JSON_DEPTH = 64
"""Most objects and arrays inside each other; OpenAI's schemas of tools allow 5 levels."""
MAX_JSON_DIGITS = 400
"""Maximum characters of a number; the longest that a 64-bit float prints has 325."""
MAX_JSON_CHARS = 1 << 20
"""Maximum characters of a text."""

_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.?)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
"""A string, or one that the text's end cuts off, or a bracket. Every quote begins a match: one pass over the text."""


def decode_json(text: str) -> Any:
    """Returns the value of a JSON text."""
    value, end = decode_json_prefix(text, 0)
    if rest := text[end:].lstrip():
        raise ValueError(f"text after the JSON value: {rest[:40]!r}")
    return value


def decode_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `start`, after white space, and the position behind it.

    Example: `decode_json_prefix('{"a": 1}; {}', 0)` -> `({"a": 1}, 8)`.
    """
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"{len(text)} characters, the limit is {MAX_JSON_CHARS}")
    while start < len(text) and text[start] in " \t\n\r":
        start += 1
    if text[start : start + 1] in ("{", "["):
        _check_depth(text, start)
    value, end = _DECODER.raw_decode(text, start)
    _check_surrogates(text[start:end], value)
    return value, end


def _check_depth(text: str, start: int) -> None:
    """Refuses deep nesting before it is decoded: an agent may have raised Python's recursion limit."""
    depth = 0
    for found in _STRUCTURE.finditer(text, start):
        mark = found[0]
        if mark in ("{", "["):
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
        elif mark in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return


def _check_surrogates(text: str, value: Any) -> None:
    r"""Refuses an unpaired surrogate, which no file, tokenizer or HTTP call can take.

    It can be in the text itself, or come from an escape such as `"\ud800"`.
    """
    written = json.dumps(value, ensure_ascii=False) if "\\u" in text else text
    try:
        written.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate (U+{ord(written[error.start]):04X})") from None


def _read_int(text: str) -> int:
    _check_digits(text)
    return int(text)


def _read_float(text: str) -> float:
    _check_digits(text)
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large for a 64-bit float")
    return value


def _check_digits(text: str) -> None:
    if len(text) > MAX_JSON_DIGITS:
        raise ValueError(f"a number of {len(text)} digits, the limit is {MAX_JSON_DIGITS}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _read_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return value


_DECODER = json.JSONDecoder(
    parse_int=_read_int, parse_float=_read_float, parse_constant=_refuse_constant, object_pairs_hook=_read_object
)
