"""Reads the text of a call's arguments from one position on, in the syntaxes of Python and Gemma."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.bounded import check_reply

_SPACE = re.compile(r"\s*+")


class CallReader:
    may_end_with_comma = False

    def __init__(self, text: str):
        check_reply(text)
        self.text, self.position = text, 0

    def skip_space(self) -> None:
        if found := _SPACE.match(self.text, self.position):
            self.position = found.end()

    def skip(self, mark: str) -> bool:
        """Returns True if the mark comes next, behind white space, and moves behind it."""
        self.skip_space()
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise self.unexpected(repr(mark))

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        if (found := pattern.match(self.text, self.position)) is None:
            raise self.unexpected(what)
        self.position = found.end()
        return found

    def unexpected(self, expected: str) -> ValueError:
        rest = self.text[self.position : self.position + 40]
        return ValueError(f"expected {expected}, found {repr(rest) if rest else 'the end of the text'}")

    def iterate_items(self, closing: str) -> Iterator[None]:
        """Yields at the start of each item, the commas between them read, and moves behind the closing mark."""
        is_first = True
        while not self.skip(closing):
            if not is_first:
                self.expect(",")
                if self.may_end_with_comma and self.skip(closing):
                    return
            is_first = False
            yield


def refuse_twice(values: Mapping[str, Any], key: str, kind: str) -> None:
    if key in values:
        raise ValueError(f"the {kind} {key[:80]!r} is there twice")
