r"""JSON text that is decoded value by value: a list of a gigabyte never has more than one of its items in memory.

text = JsonText(iter(['[{"a": 1},\n{"a"', ': 2}]']), max_chars=100)
text.take("[")  =>  True        text.decode()  =>  ({"a": 1}, '{"a": 1}')
text.take(",")  =>  True        text.peek()    =>  "{", on line 2
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_LONGEST_CUT = 16
"""Characters at the end of a part in which an error may come from the cut: `-Infinity`, an escape, a number."""


def reject_constant(name: str) -> Any:
    """Raises for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=reject_constant)


class JsonSyntaxError(ValueError):
    """Invalid JSON, with the line and the column of the whole text."""

    def __init__(self, message: str, line: int, column: int):
        super().__init__(message)
        self.message, self.line, self.column = message, line, column


class JsonTooLongError(ValueError):
    """A value that is longer than the limit."""


class JsonText:
    """The text of a file of which only the value at hand is in memory.

    Args:
        parts: The text, in parts of any length.
        max_chars: Characters of the longest value.

    Attributes:
        line: Line of the next character, from 1.
        has_dropped: True if the rest of the text was dropped.
    """

    def __init__(self, parts: Iterator[str], max_chars: int):
        self._parts, self._max_chars = parts, max_chars
        self._buffer, self._position = "", 0
        self._offset = self._line_start = 0  # of the buffer and of the current line, in the whole text
        self.line = 1
        self.has_dropped = False

    def peek(self) -> str:
        """Returns the next character after white space; empty at the end of the text."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            assert match is not None  # it matches the empty text
            self._advance(match.end())
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read_more():
                return ""

    def take(self, character: str) -> bool:
        """Skips the next character if it is this one; returns whether it was."""
        if self.peek() != character:
            return False
        self._advance(self._position + 1)
        return True

    def drop_rest(self) -> None:
        """Makes this the end of the text."""
        self._parts, self._buffer, self._position = iter(()), "", 0
        self.has_dropped = True

    def decode(self) -> tuple[Any, str]:
        """Returns the next value and its text.

        Raises:
            JsonSyntaxError: The text is no JSON.
            JsonTooLongError: The value is longer than the limit.
            ValueError: It has a constant or an integer that cannot be read.
            RecursionError: It is nested too deeply.
        """
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._read_more():
                    continue
                raise self._locate(error) from None
            if end + _LONGEST_CUT > len(self._buffer) and self._read_more():
                continue  # the rest of a number may follow
            text = self._buffer[self._position : end]
            self._advance(end)
            return value, text

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos + _LONGEST_CUT >= len(self._buffer)

    def _read_more(self) -> bool:
        """Doubles what is in memory; returns False at the end of the text."""
        left = self._buffer[self._position :]
        if len(left) > self._max_chars:
            raise JsonTooLongError(f"a value has more than {self._max_chars:,} characters")
        parts, length = [left], len(left)
        while length <= 2 * len(left) and (part := next(self._parts, "")):
            parts.append(part)
            length += len(part)
        if len(parts) == 1:
            return False
        self._offset += self._position
        self._buffer, self._position = "".join(parts), 0
        return True

    def _advance(self, end: int) -> None:
        breaks = self._buffer.count("\n", self._position, end)
        if breaks:
            self.line += breaks
            self._line_start = self._offset + self._buffer.rindex("\n", self._position, end) + 1
        self._position = end

    def _locate(self, error: json.JSONDecodeError) -> JsonSyntaxError:
        self._advance(error.pos)
        column = self._offset + error.pos - self._line_start + 1
        return JsonSyntaxError(error.msg, self.line, column)
