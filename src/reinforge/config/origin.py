"""Where each value of a configuration comes from: the command line, the file, or a default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from reinforge.config.document import KeyPath, dotted
from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that takes effect.

    Attributes:
        path: Keys joined by dots.
        value: As the resolved configuration has it; secrets and variables stay `${VAR}`.
        origin: `file:line:column`, `-o path`, or `default`.
    """

    path: str
    value: Any
    origin: str


def settings_of(loaded: LoadedConfig) -> list[Setting]:
    """Returns every value of a configuration with its origin, in the order of the sections."""
    data = yaml.safe_load(dump_config(loaded))
    return [Setting(dotted(path), value, _origin(loaded, path)) for path, value in _leaves(data, ())]


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    else:
        yield path, value


def _origin(loaded: LoadedConfig, path: KeyPath) -> str:
    mark = loaded.marks.get(path)
    if mark is None:
        # an override of a whole block (`-o trainers.t '{_type: x}'`) marks the block and nothing below it
        above = next((loaded.marks[path[:end]] for end in range(len(path), 0, -1) if path[:end] in loaded.marks), None)
        below_override = isinstance(above, str) and _stands_in(loaded.data, path)
        return str(above) if below_override else DEFAULT
    return mark if isinstance(mark, str) else f"{loaded.path}:{mark[0]}:{mark[1]}"


def _stands_in(data: Any, path: KeyPath) -> bool:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
