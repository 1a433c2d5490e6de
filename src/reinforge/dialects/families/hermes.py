"""Hermes, Qwen2.5, Qwen3, Granite 4, SmolLM3: JSON between tags, any number of times.

<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reinforge.dialects.families.family import Call, Family, ParsedReply, ToolFormat
from reinforge.dialects.families.grammar import GrammarText, quote
from reinforge.dialects.families.tools import ToolSchemas, dump
from reinforge.dialects.strict_json import decode_json_prefix

_START, _END = "<tool_call>", "</tool_call>"


class Hermes(Family):
    tool_format = ToolFormat.HERMES
    start = _START

    def matches(self, chat_template: str) -> bool:
        return _START in chat_template

    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls; the last closing tag may be missing, since the end token may have cut it off."""
        content: list[str] = []
        calls: list[Call] = []
        position = 0
        while (start := text.find(_START, position)) >= 0:
            content.append(text[position:start])
            value, position = decode_json_prefix(text, start + len(_START))
            calls += read_calls(value, "arguments")
            position = skip_closing(text, position, _END)
        return ParsedReply("".join([*content, text[position:]]).strip() if calls else text, calls)

    def write(self, calls: Sequence[Call]) -> str:
        return "\n".join(
            f"{_START}\n{dump({'name': name, 'arguments': arguments})}\n{_END}" for name, arguments in calls
        )

    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        """Returns the rules of JSON in tags, with or without line breaks: templates of this family differ in them."""
        call = write_json_call(grammar, tools, "arguments")
        end, one = grammar.marker(_END), f'"\\n"? {call} "\\n"?'
        more = f' ("\\n"? {grammar.marker(_START)} {one} {end})*' if parallel else ""
        return f"{one} {end}{more}"


def skip_closing(text: str, position: int, closing: str) -> int:
    """Returns the place behind a closing tag, which the text's end may have cut off.

    Raises:
        ValueError: Something else follows.
    """
    while position < len(text) and text[position].isspace():
        position += 1
    if text.startswith(closing, position):
        return position + len(closing)
    if closing.startswith(text[position:]):
        return len(text)
    raise ValueError(f"text after the JSON value: {text[position : position + 40]!r}")


def read_calls(value: Any, key: str) -> list[Call]:
    """Returns the calls of a JSON value: an object, or a list of objects."""
    return [read_call(each, key) for each in value] if isinstance(value, list) and value else [read_call(value, key)]


def read_call(value: Any, key: str) -> Call:
    """Returns name and arguments of a call; also accepts the other families' key for the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('not an object with a "name"')
    arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments", {}))
    if not isinstance(arguments, dict):
        raise ValueError(f"the {key} are not an object")
    return value["name"], arguments


def write_json_call(grammar: GrammarText, tools: ToolSchemas, key: str) -> str:
    """Adds a rule for a call of one of the tools as a JSON object and returns its name."""
    calls = []
    for name, schema in tools.parameters.items():
        before = f'{{"name": {dump(name)}, {dump(key)}: '
        calls.append(f"{quote(before)} {grammar.json(build_arguments_schema(schema))} {quote('}')}")
    return grammar.rule(" | ".join(calls))


def build_arguments_schema(schema: Any) -> dict[str, Any]:
    return {**schema, "type": "object"}
