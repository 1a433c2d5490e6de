"""Mistral, Ministral, Magistral, Devstral: after a token comes a list of calls (until 2024), or one name and arguments.

[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]
[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families import family
from reinforge.dialects.families.hermes import read_calls, write_json_list

_START, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*+([^\s\[{]++)\s*+")
_ID = re.compile(r"[^\[{]*+")


class Mistral(family.Family):
    """Calls after `[TOOL_CALLS]`.

    Args:
        lists: True: force the list form, which the template writes.
    """

    tool_format = family.ToolFormat.MISTRAL
    start = _START
    thinking = family.ThinkingTags("[THINK]", "[/THINK]")
    call_id_length = 9

    def __init__(self, *, lists: bool = False):
        self.lists = lists

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        start = text.find(_START)
        if start < 0:
            return family.ParsedReply(text)
        calls, position = list[family.Call](), start
        while position < len(text):
            if not text.startswith(_START, position):
                raise ValueError(f"text after a tool call: {text[position : position + 40]!r}")
            found, position = self._read_one(text, position + len(_START))
            calls += found
            while position < len(text) and text[position].isspace():
                position += 1
        return family.ParsedReply(text[:start].strip(), calls)

    def _read_one(self, text: str, position: int) -> tuple[list[family.Call], int]:
        named = _NAME.match(text, position)
        if named is None:
            value, position = decode_json_prefix(text, position)
            return read_calls(value, "arguments"), position
        position = named.end()
        if text.startswith(_CALL_ID, position):
            found = _ID.match(text, position + len(_CALL_ID))
            assert found is not None  # it matches the empty text
            position = found.end()
        if text.startswith(_ARGS, position):
            position += len(_ARGS)
        if text.startswith(_START, position) or position == len(text):
            return [(named[1], {})], position
        value, position = decode_json_prefix(text, position)
        if not isinstance(value, dict):
            raise ValueError("the arguments are not an object")
        return [(named[1], value)], position

    def write(self, calls: Sequence[family.Call]) -> str:
        if self.lists:
            return f"{_START} {family.dump([{'name': name, 'arguments': arguments} for name, arguments in calls])}"
        return "".join(f"{_START}{name}{_ARGS}{family.dump(arguments)}" for name, arguments in calls)

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        if self.lists:
            return f'" "? {write_json_list(grammar, tools, parallel=parallel)}'
        calls = [
            f"{family.quote(name)} {grammar.marker(_ARGS)} {grammar.json(family.build_arguments_schema(schema))}"
            for name, schema in tools.parameters.items()
        ]
        call = grammar.rule(" | ".join(calls))
        return f"{call} ({grammar.marker(_START)} {call})*" if parallel else call
