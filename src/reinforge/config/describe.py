"""The keys of a configuration class as readable lines: key, type, default, meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reinforge.config.fields import settable_keys

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "multiple of"}


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One key.

    Attributes:
        path: Keys joined by dots, below the class.
        kind: Type and bounds, for example `whole number ≥ 1`.
        default: As written in YAML; None: the key is required.
        description: What it means.
    """

    path: str
    kind: str
    default: str | None
    description: str


def iterate_fields(model: type[BaseModel], above: str = "") -> Iterator[FieldLine]:
    """Yields the keys of a class and of the blocks below it, in order."""
    for key, field in settable_keys(model).items():
        path = f"{above}{key}"
        block, named = _find_block(field.annotation), _find_named_block(field.annotation)
        listed = _find_listed_block(field.annotation)
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


def _find_named_block(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of the blocks in a field that maps names to blocks."""
    return _find_block(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _find_listed_block(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of the blocks in a field that lists blocks."""
    return _find_block(get_args(annotation)[0]) if get_origin(annotation) is list else None


OR_NULL = " or null"
_TYPE_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    Any: "any",
    SecretStr: "secret text",
}


def _format_kind(field: FieldInfo) -> str:
    """Returns a field's type and bounds in words."""
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
    """Returns a plain value as written in YAML."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
