"""Where each value of a configuration was set: on the command line, in the file, or by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from reinforge.config.document import KeyPath, format_path
from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in effect.

    Attributes:
        path: Keys joined by dots.
        value: As in the resolved configuration; secrets and variables stay `${VAR}`.
        origin: `file:line:column`, `-o path`, or `default`.
    """

    path: str
    value: Any
    origin: str


def list_settings(loaded: LoadedConfig) -> list[Setting]:
    """Returns every value of a configuration with its origin, section by section."""
    data = yaml.safe_load(dump_config(loaded))
    return [Setting(format_path(path), value, _find_origin(loaded, path)) for path, value in _iterate_leaves(data, ())]


def _iterate_leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _iterate_leaves(below, (*path, key))
    else:
        yield path, value


def _find_origin(loaded: LoadedConfig, path: KeyPath) -> str:
    mark = loaded.marks.get(path)
    if mark is None:
        # an override of a whole block (`-o trainers.t '{_type: x}'`) marks only the block, not the keys in it
        above = next((loaded.marks[path[:end]] for end in range(len(path), 0, -1) if path[:end] in loaded.marks), None)
        in_override = isinstance(above, str) and _has_path(loaded.data, path)
        return str(above) if in_override else DEFAULT
    return mark if isinstance(mark, str) else f"{loaded.path}:{mark[0]}:{mark[1]}"


def _has_path(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
