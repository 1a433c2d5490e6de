"""Finds the setting that is meant by a key in the wrong place.

limits.max_minutes            ->  finetuning.limits.max_minutes
finetuning.learning_rate      ->  finetuning.policy.optimizer.learning_rate
finetuning.num_generations    ->  trajectory_builders.groups.num_generations, if the file has such a builder
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ParamSpec, TypeVar

from reinforge.config.describe import iterate_fields
from reinforge.config.document import Document, KeyPath, format_path
from reinforge.config.schema import Config
from reinforge.config.sections import iterate_components
from reinforge.errors import did_you_mean
from reinforge.registry import Registry

MAX_PLACES = 2
"""A key with more places, such as `name`, says too little about which one is meant."""

NEAR = 0.75
"""How similar a misspelled key must be to one of another place."""

OTHER_NAMES = {"lr": "learning_rate"}
"""Keys by their names in other libraries, which are too short to be found by their spelling."""

SET_BY_CALLS = "finetuning.run_configuration"
"""A block that the command line fills, so it is never suggested."""

P = ParamSpec("P")
R = TypeVar("R")


def suggest_setting(document: Document, registry: Registry, path: KeyPath, allowed: Iterable[str] = ()) -> str | None:
    """Returns the path of the setting that an unknown key probably means; None: there is none, or too many.

    Args:
        document: The configuration; the settings of its components count as well.
        registry: Component types.
        path: Path of the unknown key; the keys below it must fit too.
        allowed: Keys of the same place. One that is spelled alike is a better guess than one of another place, unless
            that has exactly this key.
    """
    tail = [OTHER_NAMES.get(str(key), str(key)) for key in (path[-1], *_list_single_keys(document.get(path)))]
    places = (_list_settings(), _list_component_settings(document, registry))
    for known in places:
        for end in range(len(tail), 0, -1):
            if (found := _find_place(".".join(tail[:end]), known, path)) is not None:
                return found
    if did_you_mean(tail[0], allowed):
        return None
    near = (_find_place(key, known, path) for known in places if (key := _find_near(tail[0], known)) is not None)
    return next((found for found in near if found is not None), None)


def _list_single_keys(value: Any) -> list[str]:
    """Returns the keys below a value as long as there is only one: `{"a": {"b": 1}}` -> ["a", "b"]."""
    keys = []
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        keys.append(str(key))
    return keys


@cache
def _list_settings() -> tuple[str, ...]:
    """Returns the paths of all settings and blocks outside the components, those of `finetuning` first."""
    paths = _add_blocks(line.path for line in iterate_fields(Config))
    return tuple(
        sorted(
            (path for path in paths if not path.startswith(SET_BY_CALLS) and ".NAME" not in path),
            key=lambda path: not path.startswith("finetuning."),
        )
    )


def _list_component_settings(document: Document, registry: Registry) -> tuple[str, ...]:
    """Returns the paths of all settings of the components in a document."""
    paths: list[str] = []
    for key_path, kind, value in iterate_components(document):
        component = registry.find(kind, str(value.get("_type"))) if isinstance(value, dict) else None
        if component is not None:
            paths += [line.path for line in iterate_fields(component.config_type, f"{format_path(key_path)}.")]
    return tuple(path for path in paths if ".NAME." not in path)


def _add_blocks(paths: Iterable[str]) -> list[str]:
    """Returns paths, and before each the blocks that hold it; the schema's order is kept."""
    known: dict[str, None] = {}
    for path in paths:
        keys = path.split(".")
        known |= dict.fromkeys(".".join(keys[:end]) for end in range(1, len(keys) + 1))
    return list(known)


def _find_place(tail: str, places: Iterable[str], wrong: KeyPath) -> str | None:
    """Returns the place that ends with `tail`, the one nearest to the wrong place; None: there is none, or too many."""
    found = [place for place in places if f".{place}".endswith(f".{tail}") and place != format_path(wrong)]
    if len(found) > MAX_PLACES:
        return None
    return max(found, key=lambda place: _count_shared(place.split("."), wrong), default=None)


def _find_near(key: str, places: Iterable[str]) -> str | None:
    """Returns the key of any place that is spelled nearly like `key`."""
    keys = dict.fromkeys(place.rpartition(".")[2] for place in places)
    return next(iter(difflib.get_close_matches(key, list(keys), n=1, cutoff=NEAR)), None)


def _count_shared(keys: list[str], others: KeyPath) -> int:
    pairs = zip(keys, map(str, others), strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(keys), len(others)))


def suggest_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose error for an unknown argument names the argument or the setting that was meant."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__}() has no argument {name!r}{_suggest_argument(name, known)}")
        return function(*args, **kwargs)

    return call


def _suggest_argument(name: str, known: Iterable[str]) -> str:
    place = _find_place(OTHER_NAMES.get(name, name), _list_settings(), (name,))
    if place is not None and place.startswith("finetuning."):
        return f"; pass settings={format_as_python(place.removeprefix('finetuning.'))}"
    return did_you_mean(name, known)


def format_as_python(path: str) -> str:
    """Returns a setting as nested mappings: `policy.optimizer.eps` -> `{"policy": {"optimizer": {"eps": ...}}}`."""
    keys = path.split(".")
    return "".join(f'{{"{key}": ' for key in keys) + "..." + "}" * len(keys)
