r"""Regular expressions of the configuration, matched under a time limit and without holding up other threads.

Python's `re` can neither be interrupted nor does it release the interpreter while it matches: `^(\w+\s?)*$` on 41
characters takes hours. The `regex` package stops after a timeout and releases the interpreter. Its version 0 reads
Python's syntax; what it would read as more than that (`a{e}`, `[[:alpha:]]`) is escaped first. One difference stays:
`\w` and `\b` follow the Unicode standard (an accent counts as a part of its word, a superscript digit does not).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import regex

from reinforge.bounded import TooDeepError, refuse_depth
from reinforge.errors import EvaluationError

_PARTS = re.compile(
    r"""
    (?P<kept> \\N\{[^}]*\} | \\. | \{\d*(?:,\d*)?\} )  # a named character, an escape, a quantifier
    | (?P<set> \[\^?\]? ) | (?P<end> \] ) | (?P<brace> \{ )
    """,
    re.VERBOSE | re.DOTALL,
)


class PatternTimeout(EvaluationError):
    """A pattern took longer than its time limit; the pattern is at fault, not the text."""


@lru_cache(maxsize=512)
def compile_pattern(pattern: str) -> Any:
    """Returns a compiled pattern for `search_pattern`; a `ValueError` if it is not in Python's syntax."""
    try:
        with refuse_depth():
            re.compile(pattern)
            return regex.compile(_escape_extensions(pattern), regex.VERSION0)
    except (re.error, regex.error, TooDeepError, OverflowError, MemoryError) as error:
        raise ValueError(f"invalid regular expression: {error}") from None


def search_pattern(pattern: str, text: str, timeout_s: float, *, whole: bool = False) -> Any:
    """Returns the first match in a string, or None; with `whole` the pattern must match all of it."""
    compiled = compile_pattern(pattern)
    find = compiled.fullmatch if whole else compiled.search
    try:
        return find(text, timeout=max(timeout_s, 1e-3))
    except TimeoutError:
        raise PatternTimeout(
            f"the pattern {pattern[:80]!r} was still matching {len(text):,} characters after its time limit; "
            "repetitions inside repetitions, such as (a+)+, take exponential time"
        ) from None


def _escape_extensions(pattern: str) -> str:
    r"""Escapes what Python reads as plain characters, and `regex` as its own syntax.

    Example: `a{e}[[:x]` -> `a\{e}[\[:x]`; quantifiers such as `{2,3}` stay.
    """
    parts: list[str] = []
    position, in_set = 0, False
    for found in _PARTS.finditer(pattern):
        text = found[0]
        if found["set"] is not None and in_set:  # a plain bracket; a ] right after it ends the set
            text, in_set = f"\\{text}", not text.endswith("]")
        elif found["set"] is not None:
            in_set = True
        elif found["end"] is not None:
            in_set = False
        elif found["brace"] is not None and not in_set:
            text = "\\{"
        parts += [pattern[position : found.start()], text]
        position = found.end()
    return "".join([*parts, pattern[position:]])
