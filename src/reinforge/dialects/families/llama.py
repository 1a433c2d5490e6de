"""Llama 3.1 to 3.3: JSON by itself, or after a token; several calls are separated by semicolons.

{"name": "add", "parameters": {"a": 1}}
<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "look", "parameters": {}}
<|python_tag|>search.call(query="rain")
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families.family import Call, Family, GrammarText, ParsedReply, ToolFormat, ToolSchemas, dump
from reinforge.dialects.families.hermes import read_call, write_json_call
from reinforge.dialects.families.python_calls import PythonCalls

_TAG = "<|python_tag|>"
_BUILT_IN = re.compile(r"\w[\w-]*+\.call\(")


class Llama3(Family):
    tool_format = ToolFormat.LLAMA3

    def read(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Returns the calls; without the token, only a reply that is nothing but calls has any."""
        before, tag, after = ("", "", "") if _begins_with_call(text.strip()) else text.partition(_TAG)
        body, calls, position = (after if tag else text).strip(), list[Call](), 0
        if tag and (found := _BUILT_IN.match(body)):
            name, arguments = PythonCalls(body).read_call(found.end() - len(".call("), len(".call("))
            return ParsedReply(before.strip(), [(name, arguments)])
        try:
            while position < len(body):
                value, position = decode_json_prefix(body, position)
                calls.append(read_call(value, "parameters"))
                while position < len(body) and body[position] in "; \n":
                    position += 1
        except ValueError:
            if not tag and not _begins_with_call(body):
                return ParsedReply(text)
            raise
        return ParsedReply(before.strip() if tag else "", calls) if calls else ParsedReply(text)

    def write(self, calls: Sequence[Call]) -> str:
        return "; ".join(dump({"name": name, "parameters": arguments}) for name, arguments in calls)

    def write_rules(self, grammar: GrammarText, tools: ToolSchemas, *, parallel: bool) -> str:
        call = write_json_call(grammar, tools, "parameters")
        return f'{call} ("; " {call})*' if parallel else call


def _begins_with_call(body: str) -> bool:
    return body.startswith("{") and body[1:].lstrip().startswith('"name"')
