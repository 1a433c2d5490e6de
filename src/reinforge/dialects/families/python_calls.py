r"""Calls in Python's syntax: `f(a=1, b="x", c=[True, None])`, with JSON's words and escapes as well.

LFM2 writes them between tokens; Gemma 3 and Llama 3.2 as the whole reply, Gemma 3 also in a code block:
    <|tool_call_start|>[add(a=1, b=2), look(at="sky")]<|tool_call_end|>
    [add(a=1, b=2)]

No text is ever run, or given to Python's own parser, whose cost and failures hostile text decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from reinforge.bounded import check_reply, decode_json, decode_json_prefix, find_surrogate, join_surrogates
from reinforge.dialects.families import family
from reinforge.dialects.families.call_reader import CallReader, refuse_twice
from reinforge.dialects.families.hermes import read_calls

_NAME = re.compile(r"[^\W\d][\w.\-]*+")
_NUMBER = re.compile(r"-?\d[\d.eE+\-]*+")
_STRING = re.compile(r"'(?:[^'\\]++|\\.)*+'|\"(?:[^\"\\]++|\\.)*+\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonCalls(CallReader):
    may_end_with_comma = True

    def read_list(self, start: int) -> list[family.Call]:
        """Returns the calls of `[f(a=1), g()]` and leaves the position behind it."""
        self.position = start
        self.expect("[")
        return [self.read_call(None) for _ in self.iterate_items("]")]

    def read_call(self, name_end: int | None, opening: int = 1) -> family.Call:
        if name_end is None:
            name = self._read_name()
            self.expect("(")
        else:
            name, self.position = self.text[self.position : name_end], name_end + opening
        arguments: dict[str, Any] = {}
        for _ in self.iterate_items(")"):
            key = self._read_name()
            self.expect("=")
            refuse_twice(arguments, key, "argument")
            arguments[key] = self._read_value(1)
        return name, arguments

    def _read_name(self) -> str:
        self.skip_space()
        return self.take(_NAME, "a name")[0]

    def _read_value(self, depth: int) -> Any:
        check_reply(self.text, depth)
        self.skip_space()
        mark = self.text[self.position : self.position + 1]
        if mark in ("'", '"'):
            return self._read_string()
        if mark in ("[", "("):
            self.position += 1
            return [self._read_value(depth + 1) for _ in self.iterate_items("]" if mark == "[" else ")")]
        if mark == "{":
            self.position += 1
            return self._read_dict(depth)
        if found := _NUMBER.match(self.text, self.position):
            self.position = found.end()
            return decode_json(found[0])
        if (found := _NAME.match(self.text, self.position)) and found[0] in _WORDS:
            self.position = found.end()
            return _WORDS[found[0]]
        raise self.unexpected("a value")

    def _read_dict(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for _ in self.iterate_items("}"):
            self.skip_space()
            key = self._read_string()
            self.expect(":")
            refuse_twice(value, key, "key")
            value[key] = self._read_value(depth + 1)
        return value

    def _read_string(self) -> str:
        return decode_escapes(self.take(_STRING, "a quoted string")[0][1:-1])


def decode_escapes(text: str) -> str:
    r"""Returns a text with Python's and JSON's escapes replaced; an unknown one stays unchanged."""

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
    text = join_surrogates(text)
    if find_surrogate(text) is not None:
        raise ValueError("a lone surrogate")
    return text


_CALL = re.compile(r"\[\s*+[^\W\d][\w.\-]*+\(")
_JSON = re.compile(r"\s*+\[?\s*+\{")
_FENCE = re.compile(r"```(?:tool_code|python)?[^\S\n]*+\n(.*?)\n?```", re.DOTALL)


class Pythonic(family.Family):
    tool_format = family.ToolFormat.PYTHONIC
    thinking = None

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        """Returns the calls of a list; a reply that begins like one is not text."""
        body = text.strip()
        if body.startswith("```") and (found := _FENCE.fullmatch(body)):
            body = found[1].strip()
            body = body if body.startswith("[") else f"[{body}]"
        if not _CALL.match(body):
            return family.ParsedReply(text)
        parser = PythonCalls(body)
        calls = parser.read_list(0)
        if rest := body[parser.position :].strip():
            raise ValueError(f"text after the list of calls: {rest[:40]!r}")
        return family.ParsedReply("", calls)

    def write(self, calls: Sequence[family.Call]) -> str:
        return write_python_calls(calls)

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        return write_python_list(grammar, tools, parallel=parallel)


class LFM2(family.Family):
    """A Python list of calls between tokens; JSON, which the model also writes, is read as well."""

    tool_format = family.ToolFormat.LFM2
    start = "<|tool_call_start|>"
    end = "<|tool_call_end|>"

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        """Returns the calls; the last closing token may be missing."""

        def read_one(begin: int) -> tuple[list[family.Call], int]:
            if _JSON.match(text, begin):
                value, position = decode_json_prefix(text, begin)
                calls = read_calls(value, "arguments")
            else:
                parser = PythonCalls(text)
                calls, position = parser.read_list(begin), parser.position
            return calls, family.skip_closing(text, position, self.end)

        return family.read_marked(text, self.start, read_one)

    def write(self, calls: Sequence[family.Call]) -> str:
        return f"{self.start}{write_python_calls(calls)}{self.end}"

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        return f"{write_python_list(grammar, tools, parallel=parallel)} {grammar.marker(self.end)}"


def write_python_calls(calls: Sequence[family.Call]) -> str:
    written = (f"{name}({', '.join(f'{k}={write_value(v)}' for k, v in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def write_value(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_value(str(k))}: {write_value(v)}' for k, v in value.items())}}}"
    return repr(value)


def write_python_list(grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
    calls = []
    for name in tools.parameters:
        written = []
        for key, schema, required in tools.list_properties(name):
            value = '("True" | "False")' if tools.find_types(name, key) == {"boolean"} else grammar.json(schema)
            written.append((f"{family.quote(key + '=')} {value}", required))
        calls.append(f"{family.quote(name + '(')} {family.write_separated(grammar, written, ', ')} {family.quote(')')}")
    call = grammar.rule(" | ".join(calls))
    more = f' (", " {call})*' if parallel else ""
    return f'"[" {call}{more} "]"'
