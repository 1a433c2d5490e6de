r"""Limits of a dataset: a file that is damaged, hostile or far too large is refused by its line before work starts.

JSON is decoded value by value: a list of a gigabyte never has more than one of its items in memory.

    text = JsonText(iter(['[{"a": 1},\n{"a"', ': 2}]']), max_chars=100)
    text.take("[")  =>  True        text.decode()  =>  ({"a": 1}, '{"a": 1}')
    text.take(",")  =>  True        text.peek()    =>  "{", on line 2

Example of a refusal: `train.jsonl:7: the field messages[0].content has a lone surrogate (\ud83d), half of a character`.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem

MAX_DEPTH = 100
"""Levels of a row; also those that every JSON parser can read."""

MAX_VALUES = 10_000_000
"""Values of a row; one from Python may hold the same list many times over."""

_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}
_UNUSABLE_CHARACTER = re.compile("[\x00\ud800-\udfff]")
_SUSPECT = re.compile(r"\\u(?:0000|[dD][89a-fA-F])|\d[eE]\+?\d{3}|\d{300}")
"""What only a JSON text with an unusable character or an infinite number can hold."""


@dataclass(frozen=True)
class RowLimits:
    """Limits that a large dataset may need to raise."""

    max_rows: int = 1_000_000
    max_row_chars: int = 10_000_000
    max_file_mb: int = 4096


class TextRows:
    """The text of a file, read within limits; `newline` is that of `open`."""

    def __init__(self, path: Path, limits: RowLimits, newline: str | None = None):
        self.path, self.limits, self.newline = path, limits, newline

    def read_parts(self) -> Iterator[str]:
        """Yields the text in parts of a million characters."""
        yield from self._read_parts(1 << 20)

    def read_lines(self) -> Iterator[str]:
        """Yields the lines, with their ends; one that is too long is cut, one character beyond the limit."""
        yield from self._read_parts(None)

    def _read_parts(self, size: int | None) -> Iterator[str]:
        check_regular_file(self.path, self.limits)
        try:
            with self.path.open(encoding="utf-8-sig", newline=self.newline) as file:
                while part := file.read(size) if size else file.readline(self.limits.max_row_chars + 1):
                    yield part
        except UnicodeDecodeError:
            location = f"{self.path}:{_find_undecodable_line(self.path)}"
            raise ConfigError(Problem("", "the file is not UTF-8", "save it as UTF-8", location)) from None
        except OSError as error:
            message = f"cannot read the dataset: {error.strerror}"
            raise ConfigError(Problem("", message, "", str(self.path))) from error


def check_regular_file(path: Path, limits: RowLimits) -> None:
    """Raises a `ConfigError` unless this is a file of a size that may be read."""
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(Problem("", f"cannot read the dataset: {error.strerror}", "", str(path))) from error
    if (kind := describe_kind(found.st_mode)) is not None:
        raise ConfigError(Problem("", f"the dataset is {kind}, not a file", "save its rows to a file", str(path)))
    megabytes = found.st_size / 2**20
    if megabytes > limits.max_file_mb:
        message = f"the file has {megabytes:,.0f} MiB, more than max_file_mb ({limits.max_file_mb:,})"
        raise ConfigError(Problem("", message, "raise max_file_mb, or use fewer rows", str(path)))


def describe_kind(mode: int) -> str | None:
    """Returns what a path is, such as `a folder`, from its mode; None: a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "something else")


def is_suspect(text: str) -> bool:
    """Returns False if the JSON text of a row cannot hold anything that `find_unusable` finds; much faster."""
    return text.count("[") + text.count("{") > MAX_DEPTH or _SUSPECT.search(text) is not None


def find_unusable(value: Any, *, finite: bool = True) -> tuple[str, str] | None:
    """Returns what is wrong with a row and how to fix it; None: nothing. NaN and infinity are wrong if `finite`."""
    waiting: list[tuple[str, Any, int]] = [("", value, 1)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return None
        path, each, depth = waiting.pop()
        if depth > MAX_DEPTH + 1:
            return (
                f"the row is nested more than {MAX_DEPTH} levels deep",
                "flatten it, or write the inner part as a string",
            )
        if isinstance(each, Mapping):
            waiting += [(f"{path}.{key}"[:80], item, depth + 1) for key, item in each.items()]
            waiting += [(f"{path}.{key} (its name)"[:80], key, depth) for key in each if isinstance(key, str)]
        elif isinstance(each, list | tuple):
            waiting += [(f"{path}[{number}]"[:80], item, depth + 1) for number, item in enumerate(each)]
        elif (found := _find_unusable_scalar(each, finite)) is not None:
            where = f"the field {path.removeprefix('.')}" if path else "the row"
            printable = where.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\u0000")
            return f"{printable} has {found[0]}", found[1]
    return f"the row has more than {MAX_VALUES:,} values", "split it"


def _find_unusable_scalar(value: Any, finite: bool) -> tuple[str, str] | None:
    if isinstance(value, str):
        found = _UNUSABLE_CHARACTER.search(value)
        if found is None:
            return None
        if found[0] == "\x00":
            return "the character NUL (\\u0000), which is not text", "remove it"
        what = f"a lone surrogate (\\u{ord(found[0]):04x}), half of a character"
        return what, "write the whole character, or remove it"
    if isinstance(value, float) and finite and not math.isfinite(value):
        return f"a number that is not finite ({value})", "write a finite number, or null"
    digits = sys.get_int_max_str_digits()
    if digits and isinstance(value, int) and value.bit_length() > math.ceil(digits * math.log2(10)):
        return f"an integer of more than {digits:,} digits", "write it as a string"
    return None


def _find_undecodable_line(path: Path) -> int:
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            waiting = decoder.getstate()[0]
            try:
                decoder.decode(part)
            except UnicodeDecodeError as error:
                return line + (waiting + part)[: error.start].count(b"\n")
            line += part.count(b"\n")
    return line


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
    """The text of a file of which only the value at hand, of at most `max_chars`, is in memory."""

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
            JsonSyntaxError: The text is not JSON.
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
