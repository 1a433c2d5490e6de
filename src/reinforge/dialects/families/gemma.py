"""Gemma 4 and FunctionGemma: a syntax of their own, keys without quotes and texts between tokens.

    <|tool_call>call:add{a:1,b:<|"|>x<|"|>,c:[true,{d:null}]}<tool_call|>
    <start_function_call>call:add{a:1,b:<escape>x<escape>}<end_function_call>

Gemma 4 thinks between `<|channel>thought` and `<channel|>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from reinforge.bounded import check_reply, decode_json
from reinforge.dialects.families import family
from reinforge.dialects.families.call_reader import CallReader, refuse_twice
from reinforge.limits import get_limits

_NAME = re.compile(r"\s*+call:([^\s{]++)\s*+\{")
_KEY = re.compile(r"\s*+([^:,{}\[\]]*+):")
_PLAIN = re.compile(r"[^,}\]]++")
_WORDS = {"True": "true", "False": "false", "None": "null"}


class Gemma(family.Family):
    """Strings between quotes that are tokens; with `is_function` the tokens of FunctionGemma."""

    tool_format = family.ToolFormat.GEMMA
    start = "<|tool_call>"
    end, string = "<tool_call|>", '<|"|>'
    thinking: family.ThinkingTags | None = family.ThinkingTags("<|channel>thought", "<channel|>")

    def __init__(self, *, is_function: bool = False):
        if is_function:
            self.tool_format, self.thinking = family.ToolFormat.FUNCTION_GEMMA, None  # type: ignore[misc]
            self.start, self.end, self.string = "<start_function_call>", "<end_function_call>", "<escape>"  # type: ignore[misc]

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        reader = GemmaArguments(text, self.string)

        def read_one(begin: int) -> tuple[list[family.Call], int]:
            name = _NAME.match(text, begin)
            if name is None:
                raise ValueError("a tool call without a name")
            call = name[1], reader.read_object(name.end(), 1)
            return [call], family.skip_closing(text, reader.position, self.end)

        return family.read_marked(text, self.start, read_one)

    def write(self, calls: Sequence[family.Call]) -> str:
        return "".join(f"{self.start}call:{name}{self._write_value(arguments)}{self.end}" for name, arguments in calls)

    def _write_value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.string}{value}{self.string}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._write_value(each)}' for key, each in sorted(value.items()))}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._write_value, value))}]"
        return family.dump(value)

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        """Returns the rules of the calls; keys stand in alphabetical order, as the template writes them."""
        calls = [
            f"{family.quote(f'call:{name}')} {self._write_object(grammar, {**schema, 'type': 'object'}, schema, name)}"
            for name, schema in tools.parameters.items()
        ]
        call = f"{grammar.rule(' | '.join(calls))} {grammar.marker(self.end)}"
        return f"{call} ({grammar.marker(self.start)} {call})*" if parallel else call

    def _write_object(self, grammar: family.GrammarText, schema: Any, root: Any, path: str, depth: int = 0) -> str:
        required, properties = schema.get("required") or (), schema.get("properties") or {}
        parts = [
            (
                f"{family.quote(f'{key}:')} {self._write_rule(grammar, value, root, f'{path}.{key}', depth + 1)}",
                key in required,
            )
            for key, value in sorted(properties.items())
        ]
        return f"{family.quote('{')} {family.write_separated(grammar, parts, ',')} {family.quote('}')}"

    def _write_rule(self, grammar: family.GrammarText, schema: Any, root: Any, path: str, depth: int) -> str:
        kind = schema.get("type") if depth < get_limits().reply_depth else None
        if isinstance(schema.get("enum"), list):
            return grammar.rule(" | ".join(self._write_literal(grammar, each) for each in schema["enum"]))
        if kind == "string":
            return f"{grammar.marker(self.string)} {grammar.until(self.string)}"
        if kind in ("number", "integer", "boolean", "null"):
            return grammar.json(schema)
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = grammar.rule(self._write_rule(grammar, schema["items"], root, path, depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return grammar.rule(self._write_object(grammar, schema, root, path, depth))
        raise ValueError(
            f"tool_choice: a call of {path} cannot be forced for this model family, since it has no single type; "
            'give each parameter a "type", or use tool_choice="auto"'
        )

    def _write_literal(self, grammar: family.GrammarText, value: Any) -> str:
        if not isinstance(value, str):
            return family.quote(self._write_value(value))
        return f"{grammar.marker(self.string)} {family.quote(value)} {grammar.marker(self.string)}" if value else '""'


class GemmaArguments(CallReader):
    def __init__(self, text: str, string: str):
        super().__init__(text)
        self.string = string

    def read_object(self, start: int, depth: int) -> dict[str, Any]:
        """Returns the object whose opening brace stands before `start` and leaves the position behind it."""
        self.position = start
        value: dict[str, Any] = {}
        for _ in self.iterate_items("}"):
            key = self._read_key()
            refuse_twice(value, key, "key")
            value[key] = self._read_value(depth + 1)
        return value

    def _read_key(self) -> str:
        if self.skip(self.string):
            key = self._read_string()
            self.expect(":")
            return key
        return self.take(_KEY, "a key")[1].strip().strip('"')

    def _read_value(self, depth: int) -> Any:
        check_reply(self.text, depth)
        if self.skip(self.string):
            return self._read_string()
        if self.skip("{"):
            return self.read_object(self.position, depth)
        if self.skip("["):
            return [self._read_value(depth + 1) for _ in self.iterate_items("]")]
        word = self.take(_PLAIN, "a value")[0].strip()
        return decode_json(_WORDS.get(word, word))

    def _read_string(self) -> str:
        end = self.text.find(self.string, self.position)
        if end < 0:
            raise ValueError("an unterminated string")
        value, self.position = self.text[self.position : end], end + len(self.string)
        return value
