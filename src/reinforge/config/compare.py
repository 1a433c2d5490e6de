"""Compares two resolved configurations, also if the first one was written by an earlier release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from reinforge.config.document import ABSENT, Document, KeyPath, format_path
from reinforge.config.dump import iterate_leaves
from reinforge.config.fields import find_field
from reinforge.config.schema import Config
from reinforge.config.sections import find_component
from reinforge.files import to_json
from reinforge.registry import REGISTRY, Registry


@dataclass(frozen=True, slots=True)
class Change:
    """One value that differs; `ABSENT` stands for a key that is new, or gone."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("nothing" if value is ABSENT else to_json(value) for value in (self.old, self.new))
        return f"{self.path}: {old} -> {new}"


def compare_configs(before: str, after: str, registry: Registry | None = None) -> list[Change]:
    """Returns the values that differ between two resolved configurations.

    A key that did not exist when `before` was written counts as having had its default.
    """
    registry = registry or REGISTRY
    old, new = Document(yaml.safe_load(before) or {}), Document(yaml.safe_load(after) or {})
    _add_new_defaults(old.data, new, (), registry)
    before_values, after_values = dict(iterate_leaves(old.data)), dict(iterate_leaves(new.data))
    return [
        Change(format_path(path), before_values.get(path, ABSENT), after_values.get(path, ABSENT))
        for path in dict.fromkeys([*before_values, *after_values])
        if before_values.get(path, ABSENT) != after_values.get(path, ABSENT)
    ]


def find_changed_settings(text: str, registry: Registry | None = None) -> list[Change]:
    """Returns the values of a resolved configuration that differ from their default: default -> value.

    A key without a default is left out where its block says what it is for, such as the `_type` of a component.
    """
    registry, document = registry or REGISTRY, Document(yaml.safe_load(text) or {})
    changes = []
    for path, value in iterate_leaves(document.data):
        default = _find_default(document, path, registry)
        if path[-1:] != ("_type",) and default != value:
            changes.append(Change(format_path(path), default, value))
    return changes


def _add_new_defaults(old: Any, new: Document, path: KeyPath, registry: Registry) -> None:
    """Puts the defaults of keys that only `new` has into `old`."""
    block = new.get(path) if path else new.data
    if not isinstance(old, dict) or not isinstance(block, dict):
        return
    for key in block:
        if key in old:
            _add_new_defaults(old[key], new, (*path, key), registry)
        elif (default := _find_default(new, (*path, key), registry)) is not ABSENT:
            old[key] = default


def _find_default(document: Document, path: KeyPath, registry: Registry) -> Any:
    component_path, config_type = find_component(document, path, registry)
    field = find_field(config_type or Config, path[len(component_path) :])
    if field is None or field.is_required():
        return ABSENT
    return to_jsonable_python(field.get_default(call_default_factory=True), fallback=str)
