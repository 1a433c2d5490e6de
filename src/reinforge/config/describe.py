"""What a configuration class takes, as lines for a person: key, type, default, meaning."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reinforge.config.fields import settable_keys

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "multiple of"}


@dataclass(frozen=True, slots=True)
class FieldLine:
    """One key.

    Attributes:
        path: Keys joined by dots, below the class.
        kind: Its type with its bounds, for example `whole number ≥ 1`.
        default: As YAML would have it; None: the key is required.
        description: What it means.
    """

    path: str
    kind: str
    default: str | None
    description: str


def field_lines(model: type[BaseModel], above: str = "") -> Iterator[FieldLine]:
    """Yields the keys of a class and of the blocks below it, in their order."""
    for key, field in settable_keys(model).items():
        path = f"{above}{key}"
        block, named = _block(field.annotation), _named_block(field.annotation)
        if block is None and named is None:
            yield FieldLine(path, _kind(field), _default(field), field.description or "")
        if block is not None:
            if _default(field) in (None, "null"):
                yield FieldLine(path, "block", _default(field), field.description or "")
            yield from field_lines(block, f"{path}.")
        if named is not None:
            yield FieldLine(path, "mapping of blocks", _default(field), field.description or "")
            yield from field_lines(named, f"{path}.NAME.")


def _block(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of a field that is one block, optional or not."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation is not BaseModel:
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _block(members[0]) if len(members) == 1 else None
    return None


def _named_block(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of the values of a field that is a mapping of names to blocks."""
    return _block(get_args(annotation)[1]) if get_origin(annotation) is dict else None


OR_NULL = " or null"
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", Any: "any"}


def _kind(field: FieldInfo) -> str:
    """Returns a field's type in words, with its bounds."""
    bounds = [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in field.metadata
        for name, sign in BOUNDS.items()
        if getattr(constraint, name, None) is not None
    ]
    spelled = _spelled(field.annotation)
    kind = spelled.removesuffix(OR_NULL)
    return " ".join([kind, ", ".join(bounds)]).strip() + spelled[len(kind) :]


def _spelled(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _spelled(args[0])
    if origin is Literal:
        return " or ".join(_written(value) for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_spelled(arg) for arg in args if arg is not BaseModel))
    if origin in (list, set, frozenset) or (origin is tuple and Ellipsis in args):
        return f"list of {_spelled(args[0])}"
    if origin is tuple:
        return f"list of {len(args)}"
    if annotation is dict or origin is dict:
        return f"mapping of {_spelled(args[1])}" if args else "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str | None:
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
    return '""' if value == "" else _written(value)


def _written(value: Any) -> str:
    """Returns a plain value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
