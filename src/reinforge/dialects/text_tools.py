"""Tools for a model whose chat template has none: it reads their signatures in a message, and writes calls as text.

    add(a: integer, b: integer, round?: boolean)    Adds two numbers.
    add(a=1, b=2)
    {"name": "add", "arguments": {"a": 1, "b": 2}}

Small models that are shown a JSON schema repeat it; a signature they fill in. Either form of a call is read, and
arguments without names, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.bounded import decode_json_prefix
from reinforge.dialects.families.call_reader import refuse_twice
from reinforge.dialects.families.python_calls import PythonCalls, write_value
from reinforge.types.environment import Observation, ToolUse

PROMPT = """Functions:
{tools}

Request: {task}
Reply with the calls alone."""
_KEY = re.compile(r"([^\W\d]\w*+)\s*+[=:](?!=)")
EXAMPLES = (
    (
        "get_weather(city: string, days?: integer)    Forecasts the weather.",
        "How will the weather be in Oslo over the next 3 days?",
        'get_weather(city="Oslo", days=3)',
    ),
    (
        "get_time(place: string)    Returns the time.\n"
        "convert(amount: number, to: string)    Converts dollars.\n    to: Code of a currency.",
        "How much are 20 dollars in euros and in yen?",
        'convert(amount=20, to="EUR")\nconvert(amount=20, to="JPY")',
    ),
)
"""Functions, request and reply of earlier turns: without them a small model writes the function instead of its call."""


def write_tools(observation: Observation, prompt: str) -> list[dict[str, Any]]:
    """Returns the observation's messages, the last one with its tools: `prompt` with `{task}` and `{tools}`.

    Two examples come before it, as turns of the conversation.
    """
    *before, last = observation.messages
    messages = []
    for tools, task, reply in EXAMPLES:
        messages.append({"role": "user", "content": _fill(prompt, tools, task)})
        messages.append({"role": "assistant", "content": reply})
    tools = "\n".join(_write_signature(tool["function"]) for tool in observation.tools)
    return [*before, *messages, {**last, "content": _fill(prompt, tools, str(last["content"]))}]


def _fill(prompt: str, tools: str, task: str) -> str:
    return prompt.replace("{tools}", tools).replace("{task}", task)


def _write_signature(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {}
    lines = [f"{function['name']}({_write_fields(schema)})    {function.get('description', '')}".rstrip()]
    for name, each in _get_fields(schema).items():
        if text := each.get("description"):
            lines.append(f"    {name}: {text}")
    return "\n".join(lines)


def _write_fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    fields = _get_fields(schema).items()
    return ", ".join(f"{name}{'' if name in required else '?'}: {_write_type(each)}" for name, each in fields)


def _get_fields(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return (schema or {}).get("properties") or {}


def _write_type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    if "properties" in schema:
        return f"{{{_write_fields(schema)}}}"
    return f"[{_write_type(schema['items'])}]" if "items" in schema else str(schema.get("type", "any"))


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[ToolUse]:
    """Returns the calls of these tools in a reply, and those in JSON; what cannot be read is skipped.

    Example: `I call add(1, b=2).`, with the tool of above -> `[ToolUse("0", "add", {"a": 1, "b": 2})]`.
    """
    known = {tool["function"]["name"]: list(_get_fields(tool["function"].get("parameters"))) for tool in tools}
    names = "|".join(re.escape(name) for name in sorted(known, key=len, reverse=True))
    begin, position = re.compile(rf"\{{|(?<![\w.])(?:{names})\("), 0
    calls: list[ToolUse] = []
    while found := begin.search(text, position):
        position = found.end()
        try:
            if found[0] == "{":
                call, end = _read_json(text, found.start())
            else:
                reader = SignatureReader(text)
                call = (name := found[0][:-1]), reader.read_arguments(found.end(), known[name])
                end = reader.position
        except ValueError:
            continue
        if call is not None:
            calls.append(ToolUse(str(len(calls)), *call))
            position = end
    return calls


def write_calls(calls: Sequence[ToolUse]) -> str:
    """Returns calls as the examples write them, a line each."""
    return "\n".join(
        f"{call.name}({', '.join(f'{key}={write_value(each)}' for key, each in call.arguments.items())})"
        for call in calls
    )


class SignatureReader(PythonCalls):
    """Reads arguments as small models write them: `4, b=5` and `a: 4, b: 5`."""

    def read_arguments(self, start: int, names: Sequence[str]) -> dict[str, Any]:
        """Returns the arguments behind the opening parenthesis; those without a name have the next of the names."""
        self.position = start
        arguments: dict[str, Any] = {}
        for _ in self.iterate_items(")"):
            self.skip_space()
            if found := _KEY.match(self.text, self.position):
                self.position = found.end()
                key = found[1]
            elif (number := len(arguments)) < len(names):
                key = names[number]
            else:
                raise self.unexpected("no further argument")
            refuse_twice(arguments, key, "argument")
            arguments[key] = self._read_value(1)
        return arguments


def _read_json(text: str, start: int) -> tuple[tuple[str, dict[str, Any]] | None, int]:
    value, end = decode_json_prefix(text, start)
    name = value.get("name", value.get("function"))
    arguments = value.get("arguments", value.get("parameters"))
    is_call = isinstance(name, str) and isinstance(arguments, dict)
    return (name, arguments) if is_call else None, end
