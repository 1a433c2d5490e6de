"""Finds fields and unknown keys by the annotations of a configuration class.

pydantic silently ignores unknown keys in a nested model unless that model forbids them, so a typo in a file would have
no effect and no error. We therefore walk the data along the annotations and find those keys ourselves.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict  # before 3.12, that of `typing` misses those that pydantic accepts

from reinforge.config.document import KeyPath
from reinforge.registry import TypedConfig
from reinforge.types.key_aliases import ConfigModel

_BASE_VALIDATORS = TypedConfig.__pydantic_decorators__.model_validators.keys()
"""Validators of every component; they only take out the `_type`."""


def allowed_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the keys that a mapping for this model may have: a field's aliases, or else its name."""
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    keys: dict[str, FieldInfo] = {}
    for name, each in model.model_fields.items():
        alias = each.validation_alias or each.alias
        names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        keys.update({key: each for key in names if isinstance(key, str)})
        if by_name:
            keys[name] = each
    return keys


def find_key(name: str, field: FieldInfo) -> str:
    """Returns the key of a field in a file: its alias, or else its name."""
    alias = field.validation_alias or field.alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    return next((choice for choice in choices if isinstance(choice, str)), name)


def settable_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the keys that users set; the run itself fills in `reward` of a component."""
    return {
        key: field
        for key, field in allowed_keys(model).items()
        if not (key == "reward" and "Set by the run" in (field.description or ""))
    }


class Keys(NamedTuple):
    """The keys of some data that are not those of its fields."""

    unknown: list[tuple[KeyPath, list[str]]]  # the path of each key that no field accepts, with the keys allowed there
    aliases: dict[KeyPath, type[ConfigModel]]  # of keys spelled by an alias, nested keys first


def find_keys(annotation: Any, value: Any, path: KeyPath = ()) -> Keys:
    """Returns the unknown keys and the aliases of data for an annotation.

    Keys of a model that allows extra ones are accepted, and so are those of a model with a "before" validator, which
    may accept keys that are not fields. For a union, the member with the fewest unknown keys counts, and one whose
    `Literal` keys have other values only if there is no better one.
    """
    if annotation is Any or not isinstance(value, dict | list):
        return Keys([], {})
    candidates: list[tuple[bool, list[tuple[KeyPath, list[str]]]]] = []
    aliases: dict[KeyPath, type[ConfigModel]] = {}
    items: Mapping[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
    for variant in _iterate_variants(annotation):
        shape = _find_shape(variant, is_list=isinstance(value, list))
        if shape is None:
            continue
        is_other = any(key in items and items[key] not in allowed for key, allowed in shape.choices.items())
        unknown: list[tuple[KeyPath, list[str]]] = []
        for key, item in items.items():
            if key not in shape.fields and shape.other is None:
                unknown.append(((*path, key), shape.allowed))
                continue
            below = find_keys(shape.fields.get(key, shape.other), item, (*path, key))
            unknown += below.unknown
            aliases |= below.aliases
        aliases |= {(*path, key): variant for key in items if key in shape.aliases}
        candidates.append((is_other, unknown))
    _, best = min(candidates, key=lambda each: (each[0], len(each[1])), default=(False, []))
    return Keys(best, aliases)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one member of a union accepts in a mapping or a list."""

    fields: Mapping[Any, Any] = field(default_factory=dict)  # annotation of each key, or of each index
    other: Any = None  # annotation of all other keys; None: there are no others
    allowed: list[str] = field(default_factory=list)
    aliases: Collection[str] = ()
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of a key that tells the members apart


def _find_shape(variant: Any, *, is_list: bool) -> _Shape | None:
    """Returns what a member of a union accepts; None: not a mapping, or not a list."""
    args, origin = get_args(variant), get_origin(variant)
    if variant in (Any, object, list if is_list else dict):
        return _Shape(other=Any)
    if is_list:
        if not (isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset)):
            return None
        if origin is tuple and Ellipsis not in args:
            return _Shape(dict(enumerate(args)), other=Any)
        return _Shape(other=args[0] if args else Any)
    if origin in (dict, Mapping) and len(args) == 2:
        return _Shape(other=args[1])
    if _is_model(variant):
        return _find_model_shape(variant)
    if dataclasses.is_dataclass(variant) or is_typeddict(variant):
        hints = get_type_hints(variant)
        return _Shape(hints, allowed=list(hints))
    return None


def _find_model_shape(model: type[BaseModel]) -> _Shape:
    fields = {key: field.annotation for key, field in allowed_keys(model).items()}
    choices = {key: get_args(each) for key, each in fields.items() if get_origin(each) is Literal}
    aliases = model.key_aliases if issubclass(model, ConfigModel) else {}
    fields |= {alias: fields[key] for alias, key in aliases.items() if key in fields}
    validators = model.__pydantic_decorators__.model_validators
    rewrites = any(v.info.mode != "after" for name, v in validators.items() if name not in _BASE_VALIDATORS)
    other = Any if model.model_config.get("extra") == "allow" or rewrites else None
    return _Shape(fields, other, list(settable_keys(model)), aliases, choices)


def find_field(annotation: Any, path: KeyPath) -> FieldInfo | None:
    """Returns the field at a path below a model, or None if there is none."""
    for variant in _iterate_variants(annotation):
        if not path:
            return None
        if _is_model(variant):
            field = allowed_keys(variant).get(str(path[0]))
            if field is not None:
                return field if len(path) == 1 else find_field(field.annotation, path[1:])
        elif (args := get_args(variant)) and get_origin(variant) is not Literal:
            field = find_field(args[-1], path[1:])
            if field is not None:
                return field
    return None


def find_description(annotation: Any, path: KeyPath) -> str:
    """Returns the description of the field at a path below a model, empty if there is none."""
    field = find_field(annotation, path)
    return (field.description or "") if field is not None else ""


def _iterate_variants(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__value__"):  # a `type X = ...` alias
        yield from _iterate_variants(annotation.__value__)
    elif get_origin(annotation) is Annotated:
        yield from _iterate_variants(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for variant in get_args(annotation):
            yield from _iterate_variants(variant)
    elif _is_model(annotation) and issubclass(annotation, RootModel):
        yield from _iterate_variants(annotation.model_fields["root"].annotation)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def iterate_values(
    value: Any, path: KeyPath = (), *, without: Collection[KeyPath] = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and the value of everything that has no keys or items, except below `without`."""
    if path in without:
        return
    if isinstance(value, BaseModel):
        fields = [(find_key(name, field), getattr(value, name)) for name, field in type(value).model_fields.items()]
        items: list[tuple[Any, Any]] = [*fields, *(value.__pydantic_extra__ or {}).items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from iterate_values(item, (*path, key), without=without)


def iterate_models(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, BaseModel]]:
    """Yields the path and the instance of every block and component."""
    if isinstance(value, BaseModel):
        yield path, value
        for name, field in type(value).model_fields.items():
            yield from iterate_models(getattr(value, name), (*path, find_key(name, field)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from iterate_models(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from iterate_models(item, (*path, index))
