"""The JSON schema of a configuration file, with every registered component, for editors and other tools."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from reinforge.config.schema import Config, StageConfig
from reinforge.config.sections import SECTIONS, SINGLES, STAGE_COMPONENTS
from reinforge.registry import Component, Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _LenientSchema(GenerateJsonSchema):
    """Accepts anything for types that JSON schema does not have (functions, objects)."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        """Returns the schema that accepts anything."""
        return {}


def build_config_schema(registry: Registry) -> dict[str, Any]:
    """Returns the schema of a file; each component is chosen by its `_type`.

    A variable (`${VAR}`) is allowed in place of any value when a file is loaded, but not by this schema.
    """
    components = [component for component in registry.components() if component.kind in _list_kinds()]
    classes: list[type[BaseModel]] = list(dict.fromkeys([Config, StageConfig, *(c.config_type for c in components)]))
    by_class, whole = models_json_schema([(cls, "validation") for cls in classes], schema_generator=_LenientSchema)
    definitions: dict[str, Any] = whole.get("$defs", {})
    names = {cls: by_class[cls, "validation"]["$ref"].rpartition("/")[2] for cls in classes}
    choices: dict[str, list[dict[str, str]]] = {}
    for component in components:
        key = f"{component.kind}.{component.name}"
        definitions[key] = _add_type(component, definitions[names[component.config_type]])
        choices.setdefault(component.kind, []).append({"$ref": f"#/$defs/{key}"})
    root = dict(definitions[names[Config]])
    for path, kind in {**SECTIONS, **SINGLES}.items():
        block = _find_block(root, definitions, path[:-1])
        value: dict[str, Any] = {"oneOf": choices.get(kind, [])}
        if path in SECTIONS:
            value = {"type": "object", "additionalProperties": value}
        block["properties"] = {**block["properties"], path[-1]: {**_copy_description(block, str(path[-1])), **value}}
    stage = definitions[names[StageConfig]]
    for key, kind in STAGE_COMPONENTS.items():
        choice = {"oneOf": [*choices.get(kind, []), {"type": "null"}]}
        stage["properties"][key] = {**_copy_description(stage, key), **choice}
    used = _find_used(root, definitions)
    return {"$schema": DIALECT, **root, "$defs": {name: definitions[name] for name in sorted(used)}}


def _list_kinds() -> set[str]:
    return {*SECTIONS.values(), *SINGLES.values()}


def _add_type(component: Component, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a component's schema with its `_type`."""
    properties = {"_type": {"const": component.name}, **schema.get("properties", {})}
    return {**schema, "properties": properties, "required": ["_type", *schema.get("required", [])]}


def _find_block(root: dict[str, Any], definitions: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    block = root
    for key in path:
        block = definitions[block["properties"][key]["$ref"].rpartition("/")[2]]
    return block


def _copy_description(block: dict[str, Any], key: str) -> dict[str, str]:
    description = block["properties"][key].get("description")
    return {"description": description} if description else {}


def _find_used(schema: Any, definitions: dict[str, Any]) -> set[str]:
    """Returns the names of the definitions that a schema refers to."""
    used: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in used:
                used.add(name)
                waiting.append(definitions[name])
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return used
