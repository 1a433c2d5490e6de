"""Granite 3 and Phi-4: a list of calls in JSON after a token, which Granite closes with the end of its turn.

<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]
<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>
functools[{"name": "add", "arguments": {"a": 1}}]
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.dialects.families.family import Call, Family, ParsedReply, ToolFormat
from reinforge.dialects.families.grammar import GrammarText
from reinforge.dialects.families.hermes import read_calls, skip_closing, write_json_call
from reinforge.dialects.families.tools import ToolSchemas, dump
from reinforge.dialects.strict_json import decode_json_prefix

_START, _END, _FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["
_RESPONSE = ("<response>", "</response>")


class Granite(Family):
    tool_format = ToolFormat.GRANITE
    start = _START

    def matches(self, chat_template: str) -> bool:
        return _START in chat_template or "<|/tool|>" in chat_template

    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        body = text.strip()
        if body.startswith(_FUNCTOOLS):
            value, position = decode_json_prefix(body, len(_FUNCTOOLS) - 1)
            skip_closing(body, position, _END)
            return ParsedReply("", read_calls(value, "arguments"))
        content: list[str] = []
        calls: list[Call] = []
        position = 0
        while (start := text.find(_START, position)) >= 0:
            content.append(text[position:start])
            value, position = decode_json_prefix(text, start + len(_START))
            calls += read_calls(value, "arguments")
            if text.startswith("<|/", position):
                position = skip_closing(text, position, _END)
        if calls:
            return ParsedReply("".join([*content, text[position:]]).strip(), calls)
        if body.startswith(_RESPONSE[0]):  # Granite 3.3, behind its reasoning
            return ParsedReply(body.removeprefix(_RESPONSE[0]).removesuffix(_RESPONSE[1]).strip())
        return ParsedReply(text)

    def write(self, calls: Sequence[Call]) -> str:
        return f"{_START}{dump([{'name': name, 'arguments': arguments} for name, arguments in calls])}"

    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        call = write_json_call(grammar, tools, "arguments")
        more = f' (", " {call})*' if parallel else ""
        return f'"[" {call}{more} "]"'
