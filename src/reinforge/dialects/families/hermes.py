"""Calls in JSON.

Hermes, Qwen2.5, Qwen3, Granite 4, SmolLM3: between tags, any number of times:
    <tool_call>
    {"name": "add", "arguments": {"a": 1}}
    </tool_call>

Granite 3 and Phi-4: a list after a token, which Granite closes with the end of its turn:
    <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]
    <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>
    functools[{"name": "add", "arguments": {"a": 1}}]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families import family

_START, _END = "<tool_call>", "</tool_call>"
_LIST, _LIST_END, _FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools["
_RESPONSE = ("<response>", "</response>")


class Hermes(family.Family):
    tool_format = family.ToolFormat.HERMES
    start = _START

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        """Returns the calls; the last closing tag may be missing, since the end token may have cut it off."""

        def read_one(begin: int) -> tuple[list[family.Call], int]:
            value, position = decode_json_prefix(text, begin)
            return read_calls(value, "arguments"), family.skip_closing(text, position, _END)

        return family.read_marked(text, _START, read_one)

    def write(self, calls: Sequence[family.Call]) -> str:
        return "\n".join(
            f"{_START}\n{family.dump({'name': name, 'arguments': arguments})}\n{_END}" for name, arguments in calls
        )

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        """Returns the rules of JSON in tags, with or without line breaks: templates of this family differ in them."""
        call = write_json_call(grammar, tools, "arguments")
        end, one = grammar.marker(_END), f'"\\n"? {call} "\\n"?'
        more = f' ("\\n"? {grammar.marker(_START)} {one} {end})*' if parallel else ""
        return f"{one} {end}{more}"


def read_calls(value: Any, key: str) -> list[family.Call]:
    """Returns the calls of a JSON value: an object, or a list of objects."""
    return [read_call(each, key) for each in value] if isinstance(value, list) and value else [read_call(value, key)]


def read_call(value: Any, key: str) -> family.Call:
    """Returns name and arguments of a call; also accepts the other families' key for the arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('not an object with a "name"')
    arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments", {}))
    if not isinstance(arguments, dict):
        raise ValueError(f"the {key} are not an object")
    return value["name"], arguments


def write_json_call(grammar: family.GrammarText, tools: family.ToolSchemas, key: str) -> str:
    calls = []
    for name, schema in tools.parameters.items():
        before = f'{{"name": {family.dump(name)}, {family.dump(key)}: '
        calls.append(
            f"{family.quote(before)} {grammar.json(family.build_arguments_schema(schema))} {family.quote('}')}"
        )
    return grammar.rule(" | ".join(calls))


def write_json_list(grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
    call = write_json_call(grammar, tools, "arguments")
    more = f' (", " {call})*' if parallel else ""
    return f'"[" {call}{more} "]"'


class Granite(family.Family):
    tool_format = family.ToolFormat.GRANITE
    start = _LIST

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        body = text.strip()
        if body.startswith(_FUNCTOOLS):
            value, position = decode_json_prefix(body, len(_FUNCTOOLS) - 1)
            family.skip_closing(body, position, _LIST_END)
            return family.ParsedReply("", read_calls(value, "arguments"))

        def read_list(begin: int) -> tuple[list[family.Call], int]:
            value, position = decode_json_prefix(text, begin)
            if text.startswith("<|/", position):
                position = family.skip_closing(text, position, _LIST_END)
            return read_calls(value, "arguments"), position

        parsed = family.read_marked(text, _LIST, read_list)
        if not parsed.calls and body.startswith(_RESPONSE[0]):  # Granite 3.3, behind its reasoning
            return family.ParsedReply(body.removeprefix(_RESPONSE[0]).removesuffix(_RESPONSE[1]).strip())
        return parsed

    def write(self, calls: Sequence[family.Call]) -> str:
        return f"{_LIST}{family.dump([{'name': name, 'arguments': arguments} for name, arguments in calls])}"

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        return write_json_list(grammar, tools, parallel=parallel)
