"""DeepSeek V3 and R1, which write arguments in a code block, and V3.1, which does not.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families import family

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD = re.compile(rf"\s*+(?:{_CALL})?([^<]*+){_SEPARATOR}")
_END = re.compile(rf"\s*+(?:```)?\s*+(?:{_CALL_END})?\s*+")
_BLOCK = re.compile(r"([^\s`{]++)\s*+```(?:json)?\s*+")


class DeepSeek(family.Family):
    """Calls between tokens.

    Args:
        blocks: True: force arguments in code blocks, which the template writes.
    """

    tool_format = family.ToolFormat.DEEPSEEK
    start = _CALLS

    def __init__(self, *, blocks: bool = False):
        self.blocks = blocks

    def read(self, text: str, tools: family.ToolSchemas) -> family.ParsedReply:
        start = text.find(_CALLS)
        if start < 0:
            return family.ParsedReply(text)
        calls, position = list[family.Call](), start + len(_CALLS)
        while (head := _HEAD.match(text, position)) is not None:
            name, position = head[1].strip(), head.end()
            if name == "function" and (block := _BLOCK.match(text, position)) is not None:
                name, position = block[1], block.end()
            arguments, position = decode_json_prefix(text, position)
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are not an object")
            calls.append((name, arguments))
            end = _END.match(text, position)
            position = end.end() if end else position
        if not calls:
            raise ValueError(f"a tool call without a name: {text[position : position + 40]!r}")
        rest = text[position:].strip()
        if rest and not _CALLS_END.startswith(rest) and not rest.startswith(_CALLS_END):
            raise ValueError(f"text after a tool call: {rest[:40]!r}")
        after = rest.removeprefix(_CALLS_END) if rest.startswith(_CALLS_END) else ""
        return family.ParsedReply((text[:start] + after).strip(), calls)

    def write(self, calls: Sequence[family.Call]) -> str:
        before, after = ("\n```json\n", "\n```") if self.blocks else ("", "")
        kind = f"function{_SEPARATOR}" if self.blocks else ""
        separator = "" if self.blocks else _SEPARATOR
        written = "".join(
            f"{_CALL}{kind}{name}{separator}{before}{family.dump(arguments)}{after}{_CALL_END}"
            for name, arguments in calls
        )
        return f"{_CALLS}{written}{_CALLS_END}"

    def write_rules(self, grammar: family.GrammarText, tools: family.ToolSchemas, *, parallel: bool) -> str:
        begin, separator, end = grammar.marker(_CALL), grammar.marker(_SEPARATOR), grammar.marker(_CALL_END)
        calls = []
        for name, schema in tools.parameters.items():
            value = grammar.json(family.build_arguments_schema(schema))
            if self.blocks:
                before, after = family.quote(f"{name}\n```json\n"), family.quote("\n```")
                calls.append(f'{begin} "function" {separator} {before} {value} {after} {end}')
            else:
                calls.append(f"{begin} {family.quote(name)} {separator} {value} {end}")
        call = grammar.rule(" | ".join(calls))
        more = f' ("\\n"? {call})*' if parallel else ""
        return f"{call}{more} {grammar.marker(_CALLS_END)}"
