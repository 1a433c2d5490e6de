r"""The one reader of JSON from outside: whatever it returns, Python can also copy, compare, write and show.

    load_json('{"a": [1]}')           of a client, a service or a file: as Python reads it, but not too deep
    decode_json('{"a": [1]}')         of a model: no NaN, no duplicate keys, no lone surrogates, no endless numbers
    dump_json({"a": [1]})             a value from Python as JSON

All of them raise nothing but a `ValueError` (and `dump_json` a `TypeError`). The limits are those of `limits`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json

from reinforge.limits import get_limits

_FAST_DEPTH = 200  # of the deepest JSON that `from_json` reads
_NEXT_BRACKET = re.compile(r'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.?)*+(?:"|\Z))*+[\[\]{}]', re.DOTALL)
"""Everything up to a bracket, with whole strings, or one that the end of the text cuts off."""

_NO_MARKS = bytes({*range(256)} - {*b'",[{'})


class TooDeepError(ValueError):
    """JSON or a value with more levels than the limit."""


class TooManyError(ValueError):
    """JSON with more values than the limit."""


def load_json(data: str | bytes) -> Any:
    """Returns the value of a JSON text, which may hold all that Python reads: NaN, and halves of surrogate pairs."""
    depth = get_limits().json_depth
    if depth >= _FAST_DEPTH:
        try:
            # four times as fast as `json`; strings that it kept would hold the memory of a long body
            return from_json(data, cache_strings="none")
        except (ValueError, TypeError):  # damaged, deep, or with half a surrogate: `json` says what is wrong
            if not isinstance(data, str | bytes):
                raise
    text = data.decode(json.detect_encoding(data)) if isinstance(data, bytes) else data
    check_depth(text, 0, depth)
    return json.loads(text)


def decode_json(text: str) -> Any:
    """Returns the value of a JSON text that a model wrote."""
    value, end = decode_json_prefix(text, 0)
    if rest := text[end:].lstrip():
        raise ValueError(f"text after the JSON value: {rest[:40]!r}")
    return value


def decode_json_prefix(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at `start`, after white space, and the position behind it.

    Example: `decode_json_prefix('{"a": 1}; {}', 0)` -> `({"a": 1}, 8)`.
    """
    check_reply(text)
    while start < len(text) and text[start] in " \t\n\r":
        start += 1
    if text[start : start + 1] in ("{", "["):
        check_depth(text, start, get_limits().reply_depth)
    value, end = _DECODER.raw_decode(text, start)
    _check_surrogates(text[start:end], value)
    return value, end


def check_reply(text: str, depth: int = 0) -> None:
    """Raises a `ValueError` for what a model wrote if it is too long, or `depth` levels are too many."""
    if len(text) > get_limits().reply_chars:
        raise ValueError(f"{len(text)} characters, the limit is {get_limits().reply_chars}")
    if depth > get_limits().reply_depth:
        raise TooDeepError(f"nested deeper than {get_limits().reply_depth} levels")


def check_depth(text: str, start: int, most: int) -> None:
    """Refuses deep nesting before it is decoded: an agent may have raised Python's recursion limit."""
    if start == 0 and text.count("[") + text.count("{") <= most:
        return
    depth, found = 0, _NEXT_BRACKET.match(text, start)
    while found is not None:
        end = found.end()
        depth += 1 if text[end - 1] in "[{" else -1
        if depth > most:
            raise TooDeepError(f"nested deeper than {most} levels")
        if depth <= 0:
            return
        found = _NEXT_BRACKET.match(text, end)


def check_values(data: bytes, most: int) -> None:
    """Refuses JSON that has more than `most` values, before any of them is built."""
    marks = data.translate(None, _NO_MARKS)
    if len(marks) < most:  # nearly always: no more than these, wherever they are
        return
    if b"\\" in data:
        marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
    is_wide = b"\0" in data  # UTF-16, in which bytes of other characters look like quotes
    if is_wide or marks.count(b'"') > 4 * most or sum(map(len, marks.split(b'"')[::2])) >= most:
        raise TooManyError(f"more than {most:,} values")


def dump_json(value: Any, **options: Any) -> str:
    """Returns a value as JSON; `options` are those of `json.dumps`."""
    with refuse_depth():
        return json.dumps(value, **options)


@contextmanager
def refuse_depth() -> Iterator[None]:
    """Raises a `TooDeepError` where a function of another package follows a value, a pattern or code too deep."""
    try:
        yield
    except RecursionError:
        raise TooDeepError("it is nested too deeply") from None


def find_surrogate(text: str) -> int | None:
    """Returns the place of the first half of a surrogate pair, which no file or tokenizer can take; None: none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def replace_surrogates(text: str) -> str:
    """Returns text in which each half of a surrogate pair is a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def escape_surrogates(text: str) -> str:
    """Returns text in which each half of a surrogate pair is its escape."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def join_surrogates(text: str) -> str:
    """Returns text in which two halves of a surrogate pair are one character."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def encode_any(text: str) -> bytes:
    """Returns the bytes of any text, to measure or to hash them: also of halves of surrogate pairs."""
    return text.encode("utf-8", "surrogatepass")


def _check_surrogates(text: str, value: Any) -> None:
    written = json.dumps(value, ensure_ascii=False) if "\\u" in text else text
    if (found := find_surrogate(written)) is not None:
        raise ValueError(f"a lone surrogate (U+{ord(written[found]):04X})")


def _read_int(text: str) -> int:
    return int(_check_digits(text))


def _read_float(text: str) -> float:
    value = float(_check_digits(text))
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large for a 64-bit float")
    return value


def _check_digits(text: str) -> str:
    if len(text) > get_limits().reply_digits:
        raise ValueError(f"a number of {len(text)} digits, the limit is {get_limits().reply_digits}")
    return text


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
