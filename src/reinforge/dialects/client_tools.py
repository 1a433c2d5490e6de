"""Tools that the client runs and whose arguments an API fixes, as functions of a chat.

Responses {"type": "custom", "name": "patch"}             function patch(input), its calls items `custom_tool_call`
Responses {"type": "local_shell"}                         function local_shell(command, ...), `local_shell_call`
Responses {"type": "namespace", "name": "a", "tools": []} its functions, whose calls say `namespace`
Messages  {"type": "bash_20250124", "name": "bash"}       function bash(command, restart), its calls `tool_use`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.bounded import decode_json
from reinforge.dialects.fields import Fields, describe, keep_given, read_function

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TEXTS = {"type": "array", "items": TEXT}
INVALID_JSON = "INVALID_JSON"
"""Key under which arguments of a tool that are not a JSON object are passed on, as Anthropic recommends."""


def build_function(name: str, description: str, properties: Mapping[str, Any], required: int) -> dict[str, Any]:
    """Returns a function in the form of chat completions whose first `required` arguments must be given."""
    schema = {"type": "object", "properties": dict(properties), "required": list(properties)[:required]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def read_object(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; those that are not a JSON object as `INVALID_JSON`."""
    try:
        value = decode_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: arguments}


def write_object(value: Mapping[str, Any]) -> str:
    """Returns the arguments of a call that a client sends back, as they were sampled."""
    is_invalid = list(value) == [INVALID_JSON] and isinstance(value[INVALID_JSON], str)
    return value[INVALID_JSON] if is_invalid else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ItemTool:
    """A type of tool of the Responses API whose calls are items of their own."""

    item: str
    key: str  # what holds the arguments in an item of the type `item`: a string, or an object with those in `fixed` too
    description: str
    properties: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def write(self, arguments: str) -> Any:
        value = read_object(arguments)
        if self.item != "custom_tool_call":
            return {**self.fixed, **value}
        text = value.get(self.key)
        return text if isinstance(text, str) else arguments

    def read(self, item: Fields) -> str:
        """Returns the arguments of a call that the client sends back, as JSON."""
        if self.item == "custom_tool_call":
            return json.dumps({self.key: item.require(self.key, item.text(self.key))}, ensure_ascii=False)
        value = item.require(self.key, item.nested(self.key)).value
        return json.dumps({name: each for name, each in value.items() if name not in self.fixed}, ensure_ascii=False)


ITEM_TOOLS = {
    "custom": ItemTool("custom_tool_call", "input", "", {"input": TEXT}),
    "local_shell": ItemTool(
        "local_shell_call", "action", "Runs a command on this machine.",
        {"command": TEXTS, "working_directory": TEXT, "timeout_ms": WHOLE}, {"type": "exec", "env": {}},
    ),
    "shell": ItemTool(
        "shell_call", "action", "Runs commands in a shell on this machine.", {"commands": TEXTS, "timeout_ms": WHOLE}
    ),
    "apply_patch": ItemTool(
        "apply_patch_call", "operation", "Creates, changes or deletes a file; diff is in the V4A format.",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": TEXT, "diff": TEXT},
    ),
}  # fmt: skip
ITEM_CALLS = {tool.item: (kind, tool) for kind, tool in ITEM_TOOLS.items()}
NAMESPACE_MARK = "__"


class ResponseTools:
    """The tools of one request of the Responses API.

    Attributes:
        functions: They in the form of chat completions.
        dropped: Types of those that only the vendor's server could run.
        kinds: Name of a function -> type of its tool, and the namespace, which may be empty.
    """

    def __init__(self, tools: list[Fields]):
        self.functions: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self.kinds: dict[str, tuple[str, str]] = {}
        for tool in tools:
            self._add(tool, "")

    def _add(self, tool: Fields, namespace: str) -> None:
        kind = tool.require("type", tool.text("type"))
        if kind == "namespace":
            for each in tool.objects("tools"):
                self._add(each, tool.require("name", tool.text("name")))
        elif kind == "function":
            self._append(read_function(tool, "parameters"), kind, namespace)
        elif kind in ITEM_TOOLS:
            item, name = ITEM_TOOLS[kind], tool.require("name", tool.text("name")) if kind == "custom" else kind
            function = build_function(name, tool.text("description") or item.description, item.properties, 1)
            self._append(function, kind, namespace)
        else:
            self.dropped.append(kind)

    def _append(self, function: dict[str, Any], kind: str, namespace: str) -> None:
        name = function["function"]["name"]
        if namespace:
            function["function"]["name"] = name = f"{namespace}{NAMESPACE_MARK}{name}"
        self.functions.append(function)
        self.kinds[name] = (kind, namespace)


def write_call(call: Mapping[str, Any], item_id: str, kinds: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Returns a call of a reply as the item that the client of its tool expects."""
    name, arguments = call["function"]["name"], call["function"].get("arguments") or ""
    kind, namespace = kinds.get(name, ("function", ""))
    head = {"id": item_id, "call_id": call["id"], "status": "completed"}
    own = keep_given(namespace=namespace or None, name=name.removeprefix(f"{namespace}{NAMESPACE_MARK}"))
    if kind == "function":
        return {**head, "type": "function_call", **own, "arguments": arguments}
    tool = ITEM_TOOLS[kind]
    named = own if kind == "custom" else {}
    return {**head, "type": tool.item, **named, tool.key: tool.write(arguments)}


def read_call(item: Fields) -> dict[str, Any]:
    """Returns an item of a call that the client sends back as a call of chat completions."""
    found = item.value["type"]
    if found == "function_call":
        name, arguments = item.text("name"), item.require("arguments", item.text("arguments"))
    else:
        kind, tool = ITEM_CALLS[found]
        name, arguments = item.text("name") if kind == "custom" else kind, tool.read(item)
    namespace = item.text("namespace")
    name = item.require("name", name)
    call_id = item.text("call_id") or item.require("call_id", item.text("id"))
    name = f"{namespace}{NAMESPACE_MARK}{name}" if namespace else name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


_PATH = {"path": TEXT}
_EDITS = {
    "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": WHOLE, "insert_text": TEXT,
    "view_range": {"type": "array", "items": WHOLE},
}  # fmt: skip
_MESSAGES_TOOLS: dict[str, tuple[str, dict[str, Any], int]] = {
    "bash_": ("Runs a command in a shell that stays open.", {"command": TEXT, "restart": {"type": "boolean"}}, 0),
    "text_editor_": (
        "Shows and edits files.",
        {"command": {"enum": ["view", "create", "str_replace", "insert"]}, **_PATH, **_EDITS},
        2,
    ),
    "memory_": (
        "Reads and writes notes in /memories.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **_PATH, **_EDITS, "old_path": TEXT, "new_path": TEXT,
        },
        1,
    ),
}  # fmt: skip
"""Beginning of a type of tool, which ends with a date -> description, arguments, how many of them are required."""
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")


def read_messages_tool(tool: Fields) -> dict[str, Any] | None:
    """Returns a tool of the Messages API as a function; None: it runs on the vendor's servers."""
    kind = tool.text("type") or "custom"
    if kind == "custom":
        tool.require("input_schema", tool.value.get("input_schema"))
        return read_function(tool, "input_schema")
    if kind.startswith(_SERVER_TOOLS):
        return None
    for start, (description, properties, required) in _MESSAGES_TOOLS.items():
        if kind.startswith(start):
            return build_function(tool.require("name", tool.text("name")), description, properties, required)
    raise tool.bad(
        "type", f"tools of the type {describe(kind)} are unknown; give the agent a tool with an input_schema"
    )
