"""Calls whose parameters have a tag each: Qwen3-Coder, Qwen3.5, Nemotron 3; and GLM-4.5 and newer.

    <tool_call>                                         <tool_call>add
    <function=add>                                      <arg_key>a</arg_key>
    <parameter=a>                                       <arg_value>1</arg_value>
    1                                                   </tool_call>
    </parameter>
    </function>
    </tool_call>

A value has no quotes: the tool's schema says whether `1` is a number or a text. It ends at the first closing tag that
another parameter or the end of the call follows, so that most texts with such a tag are read as they were written.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from reinforge.bounded import check_reply
from reinforge.dialects.families import family

_START, _END = "<tool_call>", "</tool_call>"
_QWEN_START = re.compile(r"<(?:tool_call>|function=)")
_QWEN_CALL = re.compile(r"(?:<tool_call>\s*+)?<function=([^>\n]++)>\s*?\n?")
_QWEN_PARAMETER = re.compile(r"\s*+<parameter=([^>\n]++)>\n?")
_QWEN_VALUE_END = re.compile(r"\n?</parameter>(?=\s*+(?:<parameter=|</function>|\Z))")
_QWEN_END = re.compile(r"\s*+(?:</function>\s*+(?:</tool_call>)?|\Z)")
_GLM_CALL = re.compile(r"<tool_call>\s*+([^\s<]++)\s*+")
_GLM_KEY = re.compile(r"\s*+<arg_key>([^<]*+)</arg_key>\s*+<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>|\Z))")
_GLM_END = re.compile(r"\s*+(?:</tool_call>|\Z)")


class Tagged(family.Family):
    """A family with a tag a parameter; the patterns match its tags from the outside in."""

    start = _START
    call: ClassVar[re.Pattern[str]]
    parameter: ClassVar[re.Pattern[str]]
    value_end: ClassVar[re.Pattern[str]]
    call_end: ClassVar[re.Pattern[str]]

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        check_reply(text)
        content: list[str] = []
        calls: list[family.Call] = []
        position = 0
        while (start := self.find_call(text, position)) >= 0:
            content.append(text[position:start])
            found = self.call.match(text, start)
            if found is None:
                raise ValueError(f"a tool call without a name: {text[start : start + 40]!r}")
            arguments, position = self._read_arguments(text, found.end(), found[1], tools)
            calls.append((found[1], arguments))
        return family.ParsedReply("".join([*content, text[position:]]).strip() if calls else text, calls)

    def _read_arguments(
        self, text: str, position: int, name: str, tools: family.ToolSchemas
    ) -> tuple[dict[str, Any], int]:
        arguments: dict[str, Any] = {}
        while key := self.parameter.match(text, position):
            end = self.value_end.search(text, key.end())
            if end is None:
                raise ValueError(f"the parameter {key[1][:80]!r} does not end")
            if key[1] in arguments:
                raise ValueError(f"the parameter {key[1][:80]!r} is there twice")
            arguments[key[1]] = tools.read_value(name, key[1], text[key.end() : end.start()])
            position = end.end()
        closing = self.call_end.match(text, position)
        if closing is None:
            raise ValueError(f"expected a parameter or the end of the call, found {text[position : position + 40]!r}")
        return arguments, closing.end()

    @abstractmethod
    def find_call(self, text: str, position: int) -> int:
        """Returns the place of the next call, or -1."""

    def _write_value(
        self, grammar: family.GrammarText, tools: family.ToolSchemas, name: str, key: str, schema: Any, end: str
    ) -> str:
        types = tools.find_types(name, key)
        if isinstance(schema.get("enum"), list) and types == {"string"}:
            return f"({' | '.join(family.quote(str(each)) for each in schema['enum'])}) {grammar.marker(end)}"
        if types == {"string"}:
            return grammar.until(end)
        return f"{grammar.json(schema)} {grammar.marker(end)}"


class QwenXML(Tagged):
    tool_format = family.ToolFormat.QWEN_XML
    call, parameter, value_end, call_end = _QWEN_CALL, _QWEN_PARAMETER, _QWEN_VALUE_END, _QWEN_END
    call_starts = (_START, "<function=")

    def find_call(self, text: str, position: int) -> int:
        """Returns the place of the next call, whose outer tag the model sometimes leaves out."""
        found = _QWEN_START.search(text, position)
        return found.start() if found else -1

    def write(self, calls: Sequence[family.Call]) -> str:
        return "\n".join(
            f"{_START}\n<function={name}>\n"
            + "".join(f"<parameter={key}>\n{write_plain(value)}\n</parameter>\n" for key, value in arguments.items())
            + f"</function>\n{_END}"
            for name, arguments in calls
        )

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        calls = []
        for name in tools.parameters:
            parts = [family.quote(f"\n<function={name}>\n")]
            for key, schema, required in tools.list_properties(name):
                value = self._write_value(grammar, tools, name, key, schema, "\n</parameter>\n")
                rule = grammar.rule(f"{family.quote(f'<parameter={key}>{chr(10)}')} {value}")
                parts.append(rule if required else f"{rule}?")
            calls.append(" ".join([*parts, family.quote("</function>\n")]))
        call = f"{grammar.rule(' | '.join(calls))} {grammar.marker(_END)}"
        return f'{call} ("\\n" {grammar.marker(_START)} {call})*' if parallel else call


class GLM(Tagged):
    tool_format = family.ToolFormat.GLM
    call, parameter, value_end, call_end = _GLM_CALL, _GLM_KEY, _GLM_VALUE_END, _GLM_END

    def find_call(self, text: str, position: int) -> int:
        return text.find(_START, position)

    def write(self, calls: Sequence[family.Call]) -> str:
        return "\n".join(
            f"{_START}{name}\n"
            + "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{write_plain(value)}</arg_value>\n"
                for key, value in arguments.items()
            )
            + _END
            for name, arguments in calls
        )

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        key_start, key_end = grammar.marker("<arg_key>"), grammar.marker("</arg_key>")
        calls = []
        for name in tools.parameters:
            parts = [f'{family.quote(name)} "\\n"?']
            for key, schema, required in tools.list_properties(name):
                value = self._write_value(grammar, tools, name, key, schema, "</arg_value>")
                body = (
                    f'{key_start} {family.quote(key)} {key_end} "\\n"? {grammar.marker("<arg_value>")} {value} "\\n"?'
                )
                rule = grammar.rule(body)
                parts.append(rule if required else f"{rule}?")
            calls.append(" ".join(parts))
        call = f"{grammar.rule(' | '.join(calls))} {grammar.marker(_END)}"
        return f'{call} ("\\n" {grammar.marker(_START)} {call})*' if parallel else call


def write_plain(value: Any) -> str:
    return value if isinstance(value, str) else family.dump(value)
