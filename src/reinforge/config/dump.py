"""A validated configuration -> YAML that spells out every default; `load_config` reads it back."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, Secret, SecretBytes, SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from reinforge.config.document import (
    ABSENT,
    RESOLVERS,
    TAG,
    Document,
    KeyPath,
    escape,
    format_path,
    get_child,
    parse_yaml,
)
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import Config
from reinforge.config.schema_walk import find_field, find_key
from reinforge.config.sections import find_component
from reinforge.files import to_json
from reinforge.registry import REGISTRY
from reinforge.safe_text import escape_controls, is_secret_name, is_stand_in, is_token


def dump_config(loaded: LoadedConfig) -> str:
    """Returns the resolved configuration as YAML.

    A value that used `${VAR}` keeps the variable. A secret written in the file itself, by the name of its key or by its
    form, becomes a variable named after its path (`${LLMS_GPT_API_KEY}`): loading the YAML then asks for that variable
    instead of using asterisks as the key. A Python object becomes text that names it, `<python agent:reward>`.
    """
    converter = _PlainConverter(loaded)
    data = converter.convert_model(loaded.config, ())
    if moved := converter.find_moved():  # a validator moved text with ${VAR} to another key: keep the variable there
        data = _PlainConverter(loaded, moved).convert_model(loaded.config, ())
    return dump_data(data)


def dump_data(data: Any) -> str:
    text = yaml.dump(data, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True, width=120)
    return escape_controls(text)  # in double quotes, where `_represent` puts them, these are YAML's own escapes


def name_stand_in(path: KeyPath) -> str:
    """Returns the variable that stands for a secret: `("llms", "a-b", "api_key")` -> `LLMS_A_B_API_KEY`."""
    name = "_".join(map(str, path)).upper()
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


class _PlainConverter:
    """Turns a configuration into plain data.

    `moved` maps expanded values to their text with `${VAR}`, where a validator moved them to another key.
    """

    def __init__(self, loaded: LoadedConfig, moved: dict[str, str] | None = None):
        self.loaded, self.moved = loaded, moved or {}
        self.seen: set[KeyPath] = set()

    def find_moved(self) -> dict[str, str]:
        """Returns the texts with `${VAR}` whose key was not converted, by their expanded value."""
        left = {path: raw for path, raw in self.loaded.placeholders.items() if path not in self.seen}
        expanded: dict[KeyPath, Any] = {path: reduce(get_child, path, self.loaded.data) for path in left}
        return {str(expanded[path]): raw for path, raw in left.items() if expanded[path] not in ("", ABSENT)}

    def convert(self, value: Any, path: KeyPath) -> Any:
        raw = self.loaded.placeholders.get(path)
        if raw is not None:  # even if a validator turned the text into a list or an object
            self.seen.add(path)
            return _Raw(raw)
        if isinstance(value, enum.Enum):
            return self.convert(value.value, path)
        if isinstance(value, SecretStr | SecretBytes | Secret):
            return self._convert_secret(value.get_secret_value(), path)
        if is_literal_secret(path, value):
            return self._convert_secret(value, path)
        if isinstance(value, str | Path):
            return _Raw(self.moved[str(value)]) if str(value) in self.moved else escape(str(value))
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, BaseModel):
            return self.convert_model(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: self.convert(getattr(value, name), (*path, name)) for name in names}
        if isinstance(value, dict):
            return {str(key): self.convert(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.convert(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            return [self.convert(item, (*path, index)) for index, item in enumerate(sorted(value, key=str))]
        return self._convert_object(value, path)

    def convert_model(self, model: BaseModel, path: KeyPath) -> dict[str, Any]:
        """Returns a model's fields under the keys that a file uses; the `_type` of a component comes first."""
        type_name = self.loaded.types.get(path)
        plain: dict[str, Any] = {"_type": type_name} if type_name else {}
        for name, field in type(model).model_fields.items():
            key = find_key(name, field)
            plain[key] = self.convert(getattr(model, name), (*path, key))
        for key, value in (model.__pydantic_extra__ or {}).items():
            plain[key] = self.convert(value, (*path, key))
        return plain

    def _convert_secret(self, value: Any, path: KeyPath) -> Any:
        if str(value) in self.moved:
            return _Raw(self.moved[str(value)])
        if is_stand_in(str(value)):
            return value
        return _Raw(f"${{{name_stand_in(path)}}}")

    def _convert_object(self, value: Any, path: KeyPath) -> Any:
        try:
            return self.convert(to_jsonable_python(value), path)
        except PydanticSerializationError:
            source = value if hasattr(value, "__qualname__") else type(value)
            return f"<python {source.__module__}:{source.__qualname__}>"


def is_literal_secret(path: KeyPath, value: Any) -> bool:
    """Returns True for text that is a secret by the name of its key, or by its form, such as `sk-...`.

    A number counts under `password` or `api_key`, but not under `token`, where it may be the id of a token.
    """
    name = str(path[-1]) if path else ""
    if isinstance(value, str):
        return not is_stand_in(value) and (is_secret_name(name) or is_token(value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and is_secret_name(name) and not name.lower().endswith("token")


class _Raw(str):
    """Text with `${VAR}`, written without escaping."""


class _ConfigDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in RESOLVERS:
    _ConfigDumper.add_implicit_resolver(TAG + _tag, _pattern, _first)


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Writes multi-line text as a block, and in double quotes what must not reach a terminal as it is."""
    style = '"' if escape_controls(text) != text else "|" if "\n" in text else None
    return dumper.represent_scalar(TAG + "str", str(text), style=style)


_ConfigDumper.add_representer(str, _represent)
_ConfigDumper.add_representer(_Raw, _represent)


DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in effect; secrets and variables stay `${VAR}`."""

    path: str
    value: Any
    origin: str  # `file:line:column`, `-o path`, or `default`


def list_settings(loaded: LoadedConfig) -> list[Setting]:
    data = parse_yaml(dump_config(loaded)).data
    return [Setting(format_path(path), value, _find_origin(loaded, path)) for path, value in iterate_leaves(data)]


def iterate_leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and the value of everything in plain data that is not a mapping with keys."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from iterate_leaves(below, (*path, str(key)))
    else:
        yield path, value


def _find_origin(loaded: LoadedConfig, path: KeyPath) -> str:
    mark = loaded.marks.get(path)
    if mark is None:
        # an override of a whole block (`-o trainers.t '{_type: x}'`) marks only the block, not the keys in it
        above = next((loaded.marks[path[:end]] for end in range(len(path), 0, -1) if path[:end] in loaded.marks), None)
        in_override = isinstance(above, str) and reduce(get_child, path, loaded.data) is not ABSENT
        return str(above) if in_override else DEFAULT
    return mark if isinstance(mark, str) else f"{loaded.path}:{mark[0]}:{mark[1]}"


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs; `ABSENT` stands for a key that is new, or gone."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("nothing" if value is ABSENT else to_json(value) for value in (self.old, self.new))
        return f"{self.path}: {old} -> {new}"


def compare_configs(before: str, after: str) -> list[Change]:
    """Returns the values that differ between two resolved configurations.

    A key that did not exist when `before` was written counts as having had its default.
    """
    old, new = Document(parse_yaml(before).data or {}), Document(parse_yaml(after).data or {})
    _add_new_defaults(old.data, new, ())
    before_values, after_values = dict(iterate_leaves(old.data)), dict(iterate_leaves(new.data))
    paths = dict.fromkeys([*before_values, *after_values])
    blocks = {path[:end] for path in paths for end in range(len(path))}  # an empty one gains keys, or loses all
    return [
        Change(format_path(path), before_values.get(path, ABSENT), after_values.get(path, ABSENT))
        for path in paths
        if path not in blocks and before_values.get(path) != after_values.get(path)
    ]


def find_changed_settings(text: str) -> list[Change]:
    """Returns the values of a resolved configuration that differ from their default: default -> value.

    A key without a default is left out where its block says what it is for, such as the `_type` of a component.
    """
    document = Document(parse_yaml(text).data or {})
    changes = []
    for path, value in iterate_leaves(document.data):
        default = _find_default(document, path)
        if path[-1:] != ("_type",) and default != value:
            changes.append(Change(format_path(path), default, value))
    return changes


def _add_new_defaults(old: Any, new: Document, path: KeyPath) -> None:
    """Puts the defaults of keys that only `new` has into `old`."""
    block = new.get(path) if path else new.data
    if not isinstance(old, dict) or not isinstance(block, dict):
        return
    for key in block:
        if key in old:
            _add_new_defaults(old[key], new, (*path, key))
        elif (default := _find_default(new, (*path, key))) is not ABSENT:
            old[key] = default


def _find_default(document: Document, path: KeyPath) -> Any:
    component_path, config_type = find_component(document, path, REGISTRY)
    field = find_field(config_type or Config, path[len(component_path) :])
    if field is None or field.is_required():
        return ABSENT
    return to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)
