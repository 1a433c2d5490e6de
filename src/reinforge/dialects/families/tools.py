"""The function definitions of a request: names, and the JSON schemas of their parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.dialects.strict_json import decode_json

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
MAX_TYPE_DEPTH = 16
"""Most `anyOf`, `oneOf` and `$ref` inside each other that are followed to find a parameter's type."""


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """The parameters of each tool of a request, by the tool's name.

    Attributes:
        parameters: A JSON schema each; the empty one where the definition has none.
    """

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
