"""Base of the parameter blocks: what a block does not support, and which of its fields are set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from pydantic import BeforeValidator, ConfigDict

from reinforge.errors import Problem

STRICT = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class ParameterBlock:
    """Base of the blocks.

    Attributes:
        UNSUPPORTED: Fields that reinforge does not support, each with what to use instead.
    """

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}


def _replace_none(value: Any) -> Any:
    return {} if value is None else value


NONE_IS_DEFAULT = BeforeValidator(_replace_none)
"""A block that is None has its default values."""


def get_changed_fields(block: Any) -> dict[str, Any]:
    """Returns the fields of a block that differ from their defaults, by name."""
    changed = {}
    for each in fields(block):
        default = _get_default(type(block), each.name)
        if (value := getattr(block, each.name)) != default:
            changed[each.name] = value
    return changed


def _get_default(block: type, name: str) -> Any:
    return block.__pydantic_fields__[name].get_default(call_default_factory=True)  # type: ignore[attr-defined]


def find_unsupported(path: str, block: Any) -> list[Problem]:
    """Returns the unsupported fields that are set in a block or in a nested one."""
    problems, changed = [], get_changed_fields(block)
    for name, instead in block.UNSUPPORTED.items():
        if name in changed:
            message = f"is {changed[name]!r}, but this field is not supported"
            problems.append(Problem(f"{path}.{name}", message, instead))
    for name, value in vars(block).items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, each in nested:
            if is_dataclass(each) and isinstance(each, ParameterBlock):
                problems += find_unsupported(f"{path}.{name}.{key}".rstrip("."), each)
    return problems
