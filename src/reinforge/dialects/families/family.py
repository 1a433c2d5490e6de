"""The port of a model family: its texts to calls and reasoning, and the grammar that forces a call.

A family reads the raw text of a reply, with its special tokens. Earlier replies reach the model through its own chat
template; only for templates that ignore `tool_calls` does the family write the calls as text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from reinforge.bounded import decode_json
from reinforge.types.request import Message

Call = tuple[str, dict[str, Any]]  # name and arguments of a tool call


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    QWEN_XML = "qwen_xml"
    GLM = "glm"
    MISTRAL = "mistral"
    GEMMA = "gemma"
    FUNCTION_GEMMA = "function_gemma"
    PYTHONIC = "pythonic"
    LFM2 = "lfm2"
    GRANITE = "granite"
    DEEPSEEK = "deepseek"
    HARMONY = "harmony"


@dataclass(frozen=True, slots=True)
class ParsedReply:
    content: str  # the text around the calls; the whole reply if there are none
    calls: list[Call] = field(default_factory=list)
    failure: str | None = None  # why what looks like a call cannot be parsed; None: nothing is wrong
    reasoning: str | None = None

    def build_message(self, call_id: str) -> Message:
        return self.build_message_with([f"{call_id}-{number}" for number in range(len(self.calls))])

    def build_message_with(self, call_ids: Sequence[str]) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                }
                for call_id, (name, arguments) in zip(call_ids, self.calls, strict=True)
            ]
        return message


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    start: str
    end: str


THINK = ThinkingTags("<think>", "</think>")


class Family(ABC):
    """One text format of tool calls and reasoning."""

    tool_format: ClassVar[ToolFormat]
    start: ClassVar[str | None] = None
    thinking: ThinkingTags | None = THINK  # around its reasoning; None: the family's `read` finds it, or there is none
    call_id_length: ClassVar[int | None] = None  # letters and digits of an id, where the template checks it
    reads_channels: ClassVar[bool] = False  # True if `read` is needed without tools, too: it finds reasoning and text

    @property
    def call_starts(self) -> tuple[str, ...]:
        """What a call may begin with; empty: nothing marks it."""
        return () if self.start is None else (self.start,)

    @abstractmethod
    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls in a reply's text, whose reasoning was removed, and the text around them."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """Returns calls as the model writes them, for templates that ignore `tool_calls`."""

    @abstractmethod
    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        """Adds the rules of the calls and returns what follows the first `start`."""

    def write_required(
        self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool, opens_thinking: bool, thinks: bool
    ) -> str:
        """Returns the grammar's start: reasoning if the model thinks, then at least one call."""
        calls = self.write_rules(grammar, tools, parallel=parallel)
        begin = f"{grammar.marker(self.start)} {calls}" if self.start else calls
        return f"{self._write_thinking(grammar, is_open=opens_thinking)} {begin}" if thinks else begin

    def write_at_most_one(self, grammar: GrammarText, tools: ToolSchemas) -> str | None:
        """Returns the grammar's start: any text, then a call or none; None: it cannot be said."""
        if self.start is None:
            return None
        calls, free = self.write_rules(grammar, tools, parallel=False), self._write_free(grammar)
        return f"{free} | {self._write_prefix(grammar)} {calls}"

    def write_none(self, grammar: GrammarText) -> str | None:
        """Returns the grammar's start: any text without a call; None: nothing marks a call."""
        return None if self.start is None else self._write_free(grammar)

    def _write_thinking(self, grammar: GrammarText, *, is_open: bool) -> str:
        if self.thinking is None:
            return ""
        rest = f"{grammar.until(self.thinking.end)} SPACE"
        return rest if is_open else f"({grammar.marker(self.thinking.start)} {rest})?"

    def _write_free(self, grammar: GrammarText) -> str:
        assert self.start is not None
        free = grammar.text_without(self.start)
        if self.thinking is None:
            return free
        tags = f"{grammar.marker(self.thinking.start)} | {grammar.marker(self.thinking.end)}"
        return f"{free} (({tags}) {free})*"

    def _write_prefix(self, grammar: GrammarText) -> str:
        assert self.start is not None
        if self.thinking is None:
            return grammar.until(self.start)
        tags = f"{grammar.marker(self.thinking.start)} | {grammar.marker(self.thinking.end)}"
        return f"({grammar.text_without(self.start)} ({tags}))* {grammar.until(self.start)}"


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
MAX_TYPE_DEPTH = 16  # most `anyOf`, `oneOf` and `$ref` inside each other that are followed to find a parameter's type


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    parameters: Mapping[str, Mapping[str, Any]]

    @classmethod
    def from_tools(cls, tools: Sequence[Mapping[str, Any]] | None) -> ToolSchemas:
        """Returns the schemas of function definitions in OpenAI's format; other tools are left out."""
        found: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters")
                found[function["name"]] = schema if isinstance(schema, Mapping) else {}
        return cls(found)

    def select(self, name: str) -> ToolSchemas:
        if name not in self.parameters:
            known = ", ".join(self.parameters) or "none"
            raise ValueError(f"tool_choice: there is no tool {name!r} in this request; its tools: {known}")
        return ToolSchemas({name: self.parameters[name]})

    def list_properties(self, name: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
        """Yields the parameters of a tool: name, schema with all that it refers to, and whether it is required."""
        schema = self.parameters.get(name, {})
        properties, required = schema.get("properties"), schema.get("required")
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for key, value in properties.items() if isinstance(properties, Mapping) else ():
            own = dict(value) if isinstance(value, Mapping) else {}
            yield str(key), {**shared, **own}, isinstance(required, list | tuple) and key in required

    def find_types(self, name: str, parameter: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have; none: unknown."""
        for key, schema, _ in self.list_properties(name):
            if key == parameter:
                return frozenset(_find_types(schema, schema, 0))
        return frozenset()

    def read_value(self, name: str, parameter: str, text: str) -> Any:
        """Returns the value of a parameter that the model wrote without quotes: `5` is a number, or the text "5"."""
        types = self.find_types(name, parameter)
        if types == {"string"}:
            return text
        word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
        try:
            value = decode_json(word)
        except ValueError as error:
            if not types or "string" in types:
                return text
            raise ValueError(f"the parameter {parameter[:80]!r} is not JSON: {error}") from None
        if types:
            return value if _has_type(value, types) or "string" not in types else text
        return value if word == text or not isinstance(value, str) else text


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _has_type(value: Any, types: frozenset[str]) -> bool:
    kind = "null" if value is None else JSON_TYPES[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


def _find_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if depth > MAX_TYPE_DEPTH:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list | tuple):
        yield from (each for each in kind if isinstance(each, str))
    elif isinstance(schema.get("enum"), list | tuple):
        yield from ("null" if each is None else JSON_TYPES.get(type(each), "string") for each in schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or ():
            if isinstance(each, Mapping):
                yield from _find_types(each, root, depth + 1)
    if isinstance(path := schema.get("$ref"), str):
        target: Any = root
        for part in path.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        if isinstance(target, Mapping):
            yield from _find_types(target, root, depth + 1)


WHITESPACE = {"whitespace_pattern": r"(\n[ \t]{0,24}| )?"}
"""Between the parts of a JSON value, as in the engine: with any whitespace, a weak model may write nothing else."""


class GrammarText:
    """Builds a grammar in llguidance's dialect of Lark; its methods add rules and return their names.

    Two kinds of rules name what may be one token of the model, or text, which only the tokenizer knows:

        marker_1: "<tool_call>"                             this text, or this token
        until_1[suffix="</think>"]: /(?s:.*)/               any text up to and including this text, or this token

    The engine replaces them by the tokens' ids where the tokenizer has them.
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def marker(self, text: str) -> str:
        return self._add("marker", "", quote(text))

    def until(self, text: str) -> str:
        """Adds any text up to and including this one, which may be one token."""
        return self._add("until", f"[suffix={quote(text)}]", "/(?s:.*)/")

    def text(self) -> str:
        return self._add("TEXT", "", "/(?s:.*)/")

    def text_without(self, text: str) -> str:
        """Adds any text that does not contain this one."""
        return self._add("TEXT", "", f"/(?s:.*)/ & ~/(?s:.*){escape_pattern(text)}(?s:.*)/")

    def json(self, schema: Mapping[str, Any]) -> str:
        return self._add("json", "", f"%json {json.dumps({'x-guidance': WHITESPACE, **schema})}")

    def lark(self, text: str) -> str:
        """Adds a whole grammar with names of its own."""
        return self._add("lark", "", f"%lark {{\n{text}\n}}")

    def rule(self, body: str) -> str:
        return self._add("rule", "", body)

    def build(self, start: str) -> str:
        return "\n".join([f"start: {start}", "SPACE: /[ \\n]{0,8}/", *self._rules.values()]) + "\n"

    def _add(self, kind: str, attributes: str, body: str) -> str:
        text = f"{attributes}: {body}"
        key = f"{kind}{text}"
        if key not in self._names:
            name = self._names[key] = f"{kind}_{len(self._names)}"
            self._rules[name] = f"{name}{text}"
        return self._names[key]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escape_pattern(text: str) -> str:
    """Returns a pattern between slashes that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: f"\\{found[0]}", text)


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


def read_marked(text: str, start: str, read: Callable[[int], tuple[list[Call], int]]) -> ParsedReply:
    """Returns the calls that each follow `start`, and the text around them.

    Args:
        read: Returns the calls that begin at a place, and the place behind them.
    """
    content, calls, position = list[str](), list[Call](), 0
    while (begin := text.find(start, position)) >= 0:
        content.append(text[position:begin])
        found, position = read(begin + len(start))
        calls += found
    return ParsedReply("".join([*content, text[position:]]).strip() if calls else text, calls)


def skip_closing(text: str, position: int, closing: str) -> int:
    """Returns the place behind a closing tag, which the text's end may have cut off."""
    while position < len(text) and text[position].isspace():
        position += 1
    if text.startswith(closing, position):
        return position + len(closing)
    if closing.startswith(text[position:]):
        return len(text)
    raise ValueError(f"text after the JSON value: {text[position : position + 40]!r}")


def build_arguments_schema(schema: Any) -> dict[str, Any]:
    return {**schema, "type": "object"}
