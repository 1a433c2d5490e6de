"""Reads `tools` and `tool_choice`: which functions the model is offered, and which of them the reply must call.

tool_choice                                                    request
None, "auto", "none", "required"                               the same text
{"type": "function", "function": {"name": "add"}}              "add"
{"type": "allowed_tools", "allowed_tools": {"mode": M, "tools": T}}  M, and only the tools T are offered
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.bounded import refuse_depth
from reinforge.errors import did_you_mean
from reinforge.limits import get_limits
from reinforge.rollout.handle.arguments import CallArguments
from reinforge.rollout.handle.completion import to_plain_data

MODES = ("auto", "none", "required")

Tool = dict[str, Any]


def read_tools(arguments: CallArguments) -> tuple[list[Tool] | None, str]:
    """Returns the functions that the model is offered and the tool choice, as `ModelRequest` has them."""
    tools, choice = arguments.get("tools"), arguments.get("tool_choice", "auto")
    if not tools:
        if choice not in ("auto", "none"):
            raise arguments.bad("tool_choice", f"is {choice!r}, but the call has no `tools`")
        return None, "auto"
    if type(tools) is not list and (isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence)):
        raise arguments.bad("tools", f"must be a list of function definitions, found {type(tools).__name__}")
    if len(tools) > (most := get_limits().tools):
        raise arguments.bad("tools", f"may have {most} entries, found {len(tools)}")
    checked, text = _dump(tools, arguments)
    if len(text) > (most := get_limits().tool_chars):
        raise arguments.bad("tools", f"may have {most:,} characters as JSON, found {len(text):,}")
    if (problem := find_tool_problem(text)) is not None:
        raise arguments.bad(f"tools{problem[0]}", problem[1])
    if isinstance(choice, str) and choice in MODES:
        return checked, choice
    names = [tool["function"]["name"] for tool in checked]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        mode, allowed = _read_allowed(choice, names, arguments)
        return [tool for tool in checked if tool["function"]["name"] in allowed], mode
    return checked, _read_name(choice, names, arguments)


def _dump(tools: Sequence[Any], arguments: CallArguments) -> tuple[list[Tool], str]:
    try:
        with refuse_depth():
            plain = to_plain_data(list(tools))
            return plain, json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise arguments.bad("tools", f"must be plain data: {error}") from None


@functools.lru_cache(64)
def find_tool_problem(text: str) -> tuple[str, str] | None:
    """Returns where function definitions are wrong, and why; None: they are right.

    Example: `[{"type": "web_search"}]` -> `("[0]", "is a tool of the type 'web_search'; expected ...")`.
    """
    for index, tool in enumerate(json.loads(text)):
        if (problem := _find_problem(tool)) is not None:
            return f"[{index}]{problem[0]}", problem[1]
    return None


def _find_problem(tool: Any) -> tuple[str, str] | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        found = f"of the type {tool['type']!r}" if isinstance(tool, dict) and "type" in tool else "without a type"
        expected = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        return "", f"is a tool {found}; expected {expected}"
    name = function.get("name")
    if not isinstance(name, str) or not name or name in MODES:
        reserved = f', since "{name}" is a value of tool_choice' if name in MODES else ""
        return ".function.name", f"must be a name, found {name!r}{reserved}"
    if (parameters := function.get("parameters")) is None:
        return None
    where = ".function.parameters"
    if not isinstance(parameters, dict):
        return where, f"must be a JSON schema, found {type(parameters).__name__}"
    from reinforge.rollout.handle.response_format import find_schema_problem

    problem = find_schema_problem(json.dumps(parameters))
    return None if problem is None else (where, f"is not a usable JSON schema: {problem}")


def _read_name(choice: Any, names: Sequence[str], arguments: CallArguments) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        expected = f'{", ".join(MODES)}, {{"type": "function", "function": {{"name": ...}}}} or allowed_tools'
        raise arguments.bad("tool_choice", f"must be {expected}; found {choice!r}")
    return _find(name, names, arguments)


def _read_allowed(choice: Mapping[str, Any], names: Sequence[str], arguments: CallArguments) -> tuple[str, set[str]]:
    inner = choice.get("allowed_tools", choice)  # the Responses API has the two fields beside the type
    mode, tools = (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not tools:
        expected = '{"mode": "auto" or "required", "tools": [...]}'
        raise arguments.bad("tool_choice", f"allowed_tools must be {expected}; found {inner!r}")
    found = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        found.add(_find(function.get("name") if isinstance(function, Mapping) else None, names, arguments))
    return mode, found


def _find(name: Any, names: Sequence[str], arguments: CallArguments) -> str:
    if name not in names:
        hint = did_you_mean(str(name), names)
        raise arguments.bad("tool_choice", f"names the tool {name!r}{hint}; `tools` has {', '.join(names)}")
    return str(name)
