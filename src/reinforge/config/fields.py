"""What the annotations of a configuration class say about the keys below it.

pydantic ignores unknown keys in a nested model unless that model forbids them; a file's spelling mistake would then
change nothing and say nothing. So we look at the data beside the annotations and find those keys ourselves.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict  # the one of `typing` does not know those that pydantic takes before 3.12

from reinforge.config.document import KeyPath


def allowed_keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns the keys that a mapping for this model may have: aliases where a field has them, else names."""
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
    """Returns the allowed keys that are a person's to set; a component's `reward` is filled in by the run."""
    return {
        key: field
        for key, field in allowed_keys(model).items()
        if not (key == "reward" and "Set by the run" in (field.description or ""))
    }


def unknown_keys(annotation: Any, value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, list[str]]]:
    """Returns the paths of keys that no field takes, each with the keys allowed there.

    A model that allows unknown keys is believed, and so is one that rewrites its input before it is checked: it may
    know keys that are no fields. Of a union, the best fitting member counts.
    """
    fitting = [found for variant in _variants(annotation) if (found := _unknown(variant, value, path)) is not None]
    return min(fitting, key=len, default=[])


def description_of(annotation: Any, path: KeyPath) -> str:
    """Returns the description of the field at a path below a model, empty where there is none."""
    for variant in _variants(annotation):
        if not path:
            return ""
        if _is_model(variant):
            field = allowed_keys(variant).get(str(path[0]))
            if field is not None:
                return (field.description or "") if len(path) == 1 else description_of(field.annotation, path[1:])
        elif (args := get_args(variant)) and get_origin(variant) is not Literal:
            found = description_of(args[-1], path[1:])
            if found:
                return found
    return ""


def _variants(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__value__"):  # a `type X = ...` alias
        yield from _variants(annotation.__value__)
    elif get_origin(annotation) is Annotated:
        yield from _variants(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for variant in get_args(annotation):
            yield from _variants(variant)
    else:
        yield annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unknown(variant: Any, value: Any, path: KeyPath) -> list[tuple[KeyPath, list[str]]] | None:
    """Returns the unknown keys below one member of a union; None: the value does not have its shape."""
    args, origin = get_args(variant), get_origin(variant)
    if _is_model(variant) and issubclass(variant, RootModel):
        return unknown_keys(variant.model_fields["root"].annotation, value, path)
    if isinstance(value, dict):
        if _is_model(variant):
            return _unknown_in_model(variant, value, path)
        if dataclasses.is_dataclass(variant) or is_typeddict(variant):
            hints = get_type_hints(variant)
            return _below(hints, value, path) + [((*path, key), list(hints)) for key in value if key not in hints]
        if origin in (dict, Mapping) and len(args) == 2:
            return _below(dict.fromkeys(value, args[1]), value, path)
    elif isinstance(value, list) and isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        items = args if origin is tuple and Ellipsis not in args else [args[0] if args else Any] * len(value)
        return _below(dict(enumerate(items)), dict(enumerate(value)), path)
    return [] if variant in (Any, object, dict, list) or not isinstance(value, dict | list) else None


def _unknown_in_model(model: type[BaseModel], value: dict[str, Any], path: KeyPath) -> list[Any] | None:
    keys = allowed_keys(model)
    for key, field in keys.items():
        if get_origin(field.annotation) is Literal and key in value and value[key] not in get_args(field.annotation):
            return None  # a member of a union that its discriminator rules out
    found = _below({key: field.annotation for key, field in keys.items()}, value, path)
    rewrites = any(d.info.mode != "after" for d in model.__pydantic_decorators__.model_validators.values())
    if model.model_config.get("extra") == "allow" or rewrites:
        return found
    return found + [((*path, key), list(settable_keys(model))) for key in value if key not in keys]


def _below(annotations: Mapping[Any, Any], value: Mapping[Any, Any], path: KeyPath) -> list[tuple[KeyPath, list[str]]]:
    return [
        unknown
        for key, annotation in annotations.items()
        if key in value
        for unknown in unknown_keys(annotation, value[key], (*path, key))
    ]
