"""Finds fields and unknown keys by the annotations of a configuration class.

pydantic silently ignores unknown keys in a nested model unless that model forbids them, so a typo in a file would have
no effect and no error. We therefore walk the data along the annotations and find those keys ourselves.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict  # before 3.12, that of `typing` misses those that pydantic accepts

from reinforge.config.document import KeyPath
from reinforge.registry import TypedConfig
from reinforge.types.key_aliases import ConfigModel

_BASE_VALIDATORS = TypedConfig.__pydantic_decorators__.model_validators.keys()
"""Validators of every configuration class; they change only the spelling of keys, or take out the `_type`."""


def allowed_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the keys that a mapping for this model may have: a field's aliases, or else its name."""
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias or field.alias
        names = alias.choices if isinstance(alias, AliasChoices) else [alias or name]
        keys.update({key: field for key in names if isinstance(key, str)})
        if by_name:
            keys[name] = field
    return keys


def settable_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the keys that users set; the run itself fills in `reward` of a component."""
    return {
        key: field
        for key, field in allowed_keys(model).items()
        if not (key == "reward" and "Set by the run" in (field.description or ""))
    }


def find_unknown_keys(annotation: Any, value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, list[str]]]:
    """Returns the paths of keys that no field accepts, each with the keys allowed there.

    Keys of a model that allows extra ones are accepted, and so are those of a model with a "before" validator, which
    may accept keys that are not fields. For a union, the member with the fewest unknown keys counts.
    """
    candidates = [
        keys for variant in _iterate_variants(annotation) if (keys := _find_unknown(variant, value, path)) is not None
    ]
    return min(candidates, key=len, default=[])


def find_aliases(annotation: Any, value: Any, path: KeyPath = ()) -> dict[KeyPath, type[ConfigModel]]:
    """Returns the path of each key that is spelled by an alias, with its class; nested keys come first."""
    keys: dict[KeyPath, type[ConfigModel]] = {}
    for variant in _iterate_variants(annotation):
        children: dict[Any, Any] = {}
        if isinstance(value, dict) and _is_model(variant):
            fields = allowed_keys(variant)
            spellings = dict(variant.key_aliases) if issubclass(variant, ConfigModel) else {}
            for name in value:
                if (key := spellings.get(name, name)) in fields:
                    children[name] = fields[key].annotation
        elif isinstance(value, dict) and get_origin(variant) in (dict, Mapping) and len(get_args(variant)) == 2:
            spellings, children = {}, dict.fromkeys(value, get_args(variant)[1])
        elif isinstance(value, list) and get_args(variant):
            spellings, children = {}, dict.fromkeys(range(len(value)), get_args(variant)[0])
        else:
            continue
        for key, below in children.items():
            keys |= find_aliases(below, value[key], (*path, key))
        keys |= {(*path, name): variant for name in children if name in spellings}
    return keys


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
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _find_unknown(variant: Any, value: Any, path: KeyPath) -> list[tuple[KeyPath, list[str]]] | None:
    """Returns the unknown keys below one member of a union, or None if the value does not fit that member."""
    args, origin = get_args(variant), get_origin(variant)
    if _is_model(variant) and issubclass(variant, RootModel):
        return find_unknown_keys(variant.model_fields["root"].annotation, value, path)
    if isinstance(value, dict):
        if _is_model(variant):
            return _find_unknown_in_model(variant, value, path)
        if dataclasses.is_dataclass(variant) or is_typeddict(variant):
            hints = get_type_hints(variant)
            return _find_below(hints, value, path) + [((*path, key), list(hints)) for key in value if key not in hints]
        if origin in (dict, Mapping) and len(args) == 2:
            return _find_below(dict.fromkeys(value, args[1]), value, path)
    elif isinstance(value, list) and isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        items = args if origin is tuple and Ellipsis not in args else [args[0] if args else Any] * len(value)
        return _find_below(dict(enumerate(items)), dict(enumerate(value)), path)
    return [] if variant in (Any, object, dict, list) or not isinstance(value, dict | list) else None


def _find_unknown_in_model(model: type[BaseModel], value: dict[str, Any], path: KeyPath) -> list[Any] | None:
    keys = allowed_keys(model)
    for key, field in keys.items():
        if get_origin(field.annotation) is Literal and key in value and value[key] not in get_args(field.annotation):
            return None  # the discriminator rules this member of a union out
    unknown = _find_below({key: field.annotation for key, field in keys.items()}, value, path)
    validators = model.__pydantic_decorators__.model_validators
    rewrites = any(v.info.mode != "after" for name, v in validators.items() if name not in _BASE_VALIDATORS)
    if model.model_config.get("extra") == "allow" or rewrites:
        return unknown
    return unknown + [((*path, key), list(settable_keys(model))) for key in value if key not in keys]


def _find_below(
    annotations: Mapping[Any, Any], value: Mapping[Any, Any], path: KeyPath
) -> list[tuple[KeyPath, list[str]]]:
    return [
        unknown
        for key, annotation in annotations.items()
        if key in value
        for unknown in find_unknown_keys(annotation, value[key], (*path, key))
    ]
