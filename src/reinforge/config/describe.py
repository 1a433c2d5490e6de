"""The keys of configuration classes: as readable lines, and as the JSON schema of a file with every component."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import PydanticUndefined

from reinforge.config.schema import Config, StageConfig
from reinforge.config.schema_walk import settable_keys
from reinforge.config.sections import SECTIONS, SINGLES, STAGE_COMPONENTS
from reinforge.registry import Component, Registry

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "multiple of"}


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One key."""

    path: str
    kind: str  # type and bounds, such as `whole number ≥ 1`
    default: str | None  # as written in YAML; None: the key is required
    description: str


def iterate_fields(model: type[BaseModel], above: str = "") -> Iterator[FieldLine]:
    """Yields the keys of a class and of the blocks below it, in order."""
    for key, field in settable_keys(model).items():
        path = f"{above}{key}"
        block, origin = _find_block(field.annotation), get_origin(field.annotation)
        named = _find_block(get_args(field.annotation)[1]) if origin is dict else None
        listed = _find_block(get_args(field.annotation)[0]) if origin is list else None
        if block is None and named is None and listed is None:
            yield FieldLine(path, _format_kind(field), _format_default(field), field.description or "")
        if block is not None:
            if _format_default(field) in (None, "null"):
                yield FieldLine(path, "block", _format_default(field), field.description or "")
            yield from iterate_fields(block, f"{path}.")
        if named is not None:
            yield FieldLine(path, "mapping of blocks", _format_default(field), field.description or "")
            yield from iterate_fields(named, f"{path}.NAME.")
        if listed is not None:
            yield FieldLine(path, "list of blocks", _format_default(field), field.description or "")
            yield from iterate_fields(listed, f"{path}.N.")


def _find_block(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of a field that holds one block, optional or not."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation is not BaseModel:
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _find_block(members[0]) if len(members) == 1 else None
    return None


OR_NULL = " or null"
_TYPE_NAMES = {
    int: "whole number",
    float: "number",
    str: "string",
    bool: "true or false",
    Path: "path",
    Any: "any",
    SecretStr: "secret string",
}


def _format_kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    annotation = _format_annotation(field.annotation)
    kind = annotation.removesuffix(OR_NULL)
    return " ".join([kind, ", ".join(bounds)]).strip() + annotation[len(kind) :]


def _format_annotation(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _TYPE_NAMES:
        return _TYPE_NAMES[annotation]
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _format_annotation(args[0])
    if origin is Literal:
        return " or ".join(_format_value(value) for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_format_annotation(arg) for arg in args if arg is not BaseModel))
    if origin in (list, set, frozenset) or (origin is tuple and Ellipsis in args):
        return f"list of {_format_annotation(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}"
    if annotation is dict or origin is dict:
        return f"mapping of {_format_annotation(args[1])}" if args else "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _format_default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True) if field.default is PydanticUndefined else field.default
    if isinstance(value, BaseModel):
        return "{}"
    if isinstance(value, dict) and value:
        return f"{{{', '.join(f'{key}: {each}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else _format_value(value)


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _LenientSchema(GenerateJsonSchema):
    """Accepts anything for types that JSON schema does not have (functions, objects)."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def build_config_schema(registry: Registry) -> dict[str, Any]:
    """Returns the schema of a file; each component is chosen by its `_type`.

    A variable (`${VAR}`) is allowed in place of any value when a file is loaded, but not by this schema.
    """
    kinds = {*SECTIONS.values(), *SINGLES.values()}
    components = [component for component in registry.components() if component.kind in kinds]
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
        block = _follow(root, definitions, path[:-1])
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


def _add_type(component: Component, schema: dict[str, Any]) -> dict[str, Any]:
    properties = {"_type": {"const": component.name}, **schema.get("properties", {})}
    return {**schema, "properties": properties, "required": ["_type", *schema.get("required", [])]}


def _follow(root: dict[str, Any], definitions: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    block = root
    for key in path:
        block = definitions[block["properties"][key]["$ref"].rpartition("/")[2]]
    return block


def _copy_description(block: dict[str, Any], key: str) -> dict[str, str]:
    description = block["properties"][key].get("description")
    return {"description": description} if description else {}


def _find_used(schema: Any, definitions: dict[str, Any]) -> set[str]:
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
