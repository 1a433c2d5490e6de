r"""Reads calls in Python's syntax: `f(a=1, b="x", c=[True, None])`, with JSON's words and escapes as well.

No text is ever run, or given to Python's own parser, whose cost and failures hostile text decides.
"""

from __future__ import annotations

import re
from typing import Any

from reinforge.dialects.families.family import Call
from reinforge.dialects.strict_json import MAX_JSON_CHARS, MAX_JSON_DEPTH, decode_json

_NAME = re.compile(r"[^\W\d][\w.\-]*+")
_NUMBER = re.compile(r"-?\d[\d.eE+\-]*+")
_STRING = re.compile(r"'(?:[^'\\]++|\\.)*+'|\"(?:[^\"\\]++|\\.)*+\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonCalls:
    def __init__(self, text: str):
        if len(text) > MAX_JSON_CHARS:
            raise ValueError(f"{len(text)} characters, the limit is {MAX_JSON_CHARS}")
        self.text, self.position = text, 0

    def read_list(self, start: int) -> list[Call]:
        """Returns the calls of `[f(a=1), g()]` and leaves the position behind it."""
        self.position = start
        self._expect("[")
        calls: list[Call] = []
        while not self._skip("]"):
            if calls:
                self._expect(",")
                if self._skip("]"):
                    break
            calls.append(self.read_call(None))
        return calls

    def read_call(self, name_end: int | None, opening: int = 1) -> Call:
        if name_end is None:
            name = self._read_name()
            self._expect("(")
        else:
            name, self.position = self.text[self.position : name_end], name_end + opening
        arguments: dict[str, Any] = {}
        while not self._skip(")"):
            if arguments:
                self._expect(",")
                if self._skip(")"):
                    break
            key = self._read_name()
            self._expect("=")
            if key in arguments:
                raise ValueError(f"the argument {key[:80]!r} is there twice")
            arguments[key] = self._read_value(1)
        return name, arguments

    def _read_name(self) -> str:
        self._skip_space()
        found = _NAME.match(self.text, self.position)
        if found is None:
            raise ValueError(f"expected a name, found {self._rest()}")
        self.position = found.end()
        return found[0]

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
        self._skip_space()
        mark = self.text[self.position : self.position + 1]
        if mark in ("'", '"'):
            return self._read_string()
        if mark in ("[", "("):
            self.position += 1
            return self._read_items("]" if mark == "[" else ")", depth)
        if mark == "{":
            self.position += 1
            return self._read_dict(depth)
        if found := _NUMBER.match(self.text, self.position):
            self.position = found.end()
            return decode_json(found[0])
        if (found := _NAME.match(self.text, self.position)) and found[0] in _WORDS:
            self.position = found.end()
            return _WORDS[found[0]]
        raise ValueError(f"expected a value, found {self._rest()}")

    def _read_items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._skip(closing):
            if items:
                self._expect(",")
                if self._skip(closing):
                    break
            items.append(self._read_value(depth + 1))
        return items

    def _read_dict(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not self._skip("}"):
            if value:
                self._expect(",")
                if self._skip("}"):
                    break
            self._skip_space()
            key = self._read_string()
            self._expect(":")
            if key in value:
                raise ValueError(f"the key {key[:80]!r} is there twice")
            value[key] = self._read_value(depth + 1)
        return value

    def _read_string(self) -> str:
        found = _STRING.match(self.text, self.position)
        if found is None:
            raise ValueError(f"expected a text in quotes, found {self._rest()}")
        self.position = found.end()
        return decode_escapes(found[0][1:-1])

    def _skip_space(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def _skip(self, mark: str) -> bool:
        self._skip_space()
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise ValueError(f"expected {mark!r}, found {self._rest()}")

    def _rest(self) -> str:
        rest = self.text[self.position : self.position + 40]
        return repr(rest) if rest else "the end of the text"


def decode_escapes(text: str) -> str:
    r"""Returns a text with Python's and JSON's escapes replaced; an unknown one stays as it is.

    Raises:
        ValueError: It has half of a surrogate pair.
    """

    def replace(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            code = int(escape[1:], 16)
            if code > 0x10FFFF:
                raise ValueError(f"there is no character {found[0]}")
            return chr(code)
        return _LETTERS.get(escape, escape if escape in "\\'\"/" else found[0])

    if "\\" in text:
        text = _ESCAPE.sub(replace, text)
    if text.isascii():
        return text
    try:  # two halves of a pair become one character
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ValueError("a lone surrogate") from None
