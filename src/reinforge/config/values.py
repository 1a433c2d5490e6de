"""Walks the values of a validated configuration."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import BaseModel

from reinforge.config.document import KeyPath


def iterate_values(
    value: Any, path: KeyPath = (), *, without: Collection[KeyPath] = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the path and the value of everything that is not a block, a mapping or a list, defaults included.

    Args:
        value: The configuration, or a part of it.
        path: Its path.
        without: Paths to leave out, with everything below them.
    """
    if path in without:
        return
    if isinstance(value, BaseModel):
        fields = [(name, getattr(value, name)) for name in type(value).model_fields]
        items: list[tuple[Any, Any]] = [*fields, *(value.__pydantic_extra__ or {}).items()]
    elif isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
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
        for name in type(value).model_fields:
            yield from iterate_models(getattr(value, name), (*path, name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from iterate_models(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from iterate_models(item, (*path, index))
