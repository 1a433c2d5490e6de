"""Calls as a Python list: LFM2 between tokens; Gemma 3 and Llama 3.2 as the whole reply, Gemma 3 also in a code block.

<|tool_call_start|>[add(a=1, b=2), look(at="sky")]<|tool_call_end|>
[add(a=1, b=2)]
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from reinforge.dialects.families.family import Call, Family, ParsedReply, ToolFormat
from reinforge.dialects.families.grammar import GrammarText, quote
from reinforge.dialects.families.hermes import read_calls, skip_closing
from reinforge.dialects.families.python_calls import PythonCalls
from reinforge.dialects.families.tools import ToolSchemas
from reinforge.dialects.strict_json import decode_json_prefix

_CALL = re.compile(r"\[\s*+[^\W\d][\w.\-]*+\(")
_JSON = re.compile(r"\s*+\[?\s*+\{")
_FENCE = re.compile(r"```(?:tool_code|python)?[^\S\n]*+\n(.*?)\n?```", re.DOTALL)


class Pythonic(Family):
    """A reply that is nothing but a Python list of calls."""

    tool_format = ToolFormat.PYTHONIC
    thinking = None

    def matches(self, chat_template: str) -> bool:
        return "tool_code" in chat_template or re.search(r"\[\w+\(\w+=", chat_template) is not None

    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls of a list; a reply that begins like one is no text."""
        body = text.strip()
        if body.startswith("```") and (found := _FENCE.fullmatch(body)):
            body = found[1].strip()
            body = body if body.startswith("[") else f"[{body}]"
        if not _CALL.match(body):
            return ParsedReply(text)
        parser = PythonCalls(body)
        calls = parser.read_list(0)
        if rest := body[parser.position :].strip():
            raise ValueError(f"text after the list of calls: {rest[:40]!r}")
        return ParsedReply("", calls)

    def write(self, calls: Sequence[Call]) -> str:
        return write_python_calls(calls)

    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        return write_python_list(grammar, tools, parallel=parallel)


class LFM2(Family):
    """A Python list of calls between tokens; JSON, which the model also writes, is read as well."""

    tool_format = ToolFormat.LFM2
    start: ClassVar[str | None] = "<|tool_call_start|>"
    end: ClassVar[str] = "<|tool_call_end|>"

    def matches(self, chat_template: str) -> bool:
        return "<|tool_call_start|>" in chat_template or "<|tool_list_start|>" in chat_template

    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls; the last closing token may be missing."""
        assert self.start is not None
        content: list[str] = []
        calls: list[Call] = []
        position, parser = 0, PythonCalls(text)
        while (start := text.find(self.start, position)) >= 0:
            content.append(text[position:start])
            begin = start + len(self.start)
            if _JSON.match(text, begin):
                value, position = decode_json_prefix(text, begin)
                calls += read_calls(value, "arguments")
            else:
                calls += parser.read_list(begin)
                position = parser.position
            position = skip_closing(text, position, self.end)
        return ParsedReply("".join([*content, text[position:]]).strip() if calls else text, calls)

    def write(self, calls: Sequence[Call]) -> str:
        return f"{self.start}{write_python_calls(calls)}{self.end}"

    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        return f"{write_python_list(grammar, tools, parallel=parallel)} {grammar.marker(self.end)}"


def write_python_calls(calls: Sequence[Call]) -> str:
    written = (f"{name}({', '.join(f'{k}={write_value(v)}' for k, v in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def write_value(value: Any) -> str:
    """Returns a value in Python's syntax, texts in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_value(str(k))}: {write_value(v)}' for k, v in value.items())}}}"
    return repr(value)


def write_python_list(grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
    calls = []
    for name in tools.parameters:
        written = []
        for key, schema, required in tools.list_properties(name):
            value = '("True" | "False")' if tools.find_types(name, key) == {"boolean"} else grammar.json(schema)
            written.append((f"{quote(key + '=')} {value}", required))
        calls.append(f"{quote(name + '(')} {write_separated(grammar, written, ', ')} {quote(')')}")
    call = grammar.rule(" | ".join(calls))
    more = f' (", " {call})*' if parallel else ""
    return f'"[" {call}{more} "]"'


def write_separated(grammar: GrammarText, parts: Sequence[tuple[str, bool]], separator: str) -> str:
    """Returns a rule of parts in their order with a separator between them; those that are not required may be missing.

    Example: a, b required, c not -> `a "," b ("," c)?`; with none required, any beginning is possible.
    """
    rest = {True: "", False: ""}  # what may follow, after a part or at the beginning
    for body, required in reversed(parts):
        after = grammar.rule(rest[True]) if rest[True] else ""
        first = grammar.rule(rest[False]) if rest[False] else ""
        with_separator, alone = f"{quote(separator)} {body} {after}".strip(), f"{body} {after}".strip()
        if required:
            rest = {True: with_separator, False: alone}
        else:
            rest = {
                True: f"{with_separator} | {after}" if after else f"({with_separator})?",
                False: f"{alone} | {first}" if first else f"({alone})?",
            }
    return f"({rest[False]})" if rest[False] else ""
