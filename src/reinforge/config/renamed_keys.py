"""Puts every key of a document under its current name, and warns about old names."""

from __future__ import annotations

from typing import Any

from reinforge.config.document import Document, KeyPath, format_path
from reinforge.config.fields import find_other_spellings
from reinforge.config.schema import Config
from reinforge.config.sections import iterate_components
from reinforge.registry import Registry
from reinforge.types.key_aliases import ConfigModel, describe_conflict, warn_renamed


def rename_keys(
    document: Document, registry: Registry, raw: dict[KeyPath, str] | None = None, *, warn: bool = True
) -> None:
    """Renames the keys of a document that have an old name or another spelling, with their marks.

    An override takes precedence over another spelling of its key in the file. Two spellings of a key that are both in
    the file, or both set by `-o`, are reported as a problem.

    Args:
        document: Changed in place.
        registry: Has the classes of the components.
        raw: Text with `${VAR}` by path; its paths are renamed too.
        warn: Warn about old names.
    """
    keys: dict[KeyPath, type[ConfigModel]] = {}
    for path, kind, value in iterate_components(document):
        name = value.get("_type") if isinstance(value, dict) else None
        component = registry.find(kind, name) if isinstance(name, str) else None
        if component is not None:
            keys |= find_other_spellings(component.config_type, value, path)
    keys |= find_other_spellings(Config, document.data)
    for path, config_type in keys.items():
        current = config_type.old_names().get(str(path[-1]))
        if warn and current is not None:
            warn_renamed(format_path(path), current, _locate(document, path))
        _rename(document, path, config_type, raw if raw is not None else {})


def _rename(document: Document, path: KeyPath, config_type: type[ConfigModel], raw: dict[KeyPath, str]) -> None:
    block, name = document.get(path[:-1]), str(path[-1])
    key = config_type.other_spellings()[name]
    new_path = (*path[:-1], key)
    if key in block:
        if _is_override(document, path) == _is_override(document, new_path):
            document.report(path, describe_conflict(name, key, key), f'remove "{name}"')
        old_wins = _is_override(document, path) and not _is_override(document, new_path)
        _drop(document, new_path if old_wins else path, raw)
        if not old_wins:
            return
    items = [(key if each == name else each, value) for each, value in block.items()]
    block.clear()
    block.update(items)
    for table in (document.marks, raw):
        _move(table, path, new_path)


def _locate(document: Document, path: KeyPath) -> str:
    mark = document.mark(path)
    return f"{document.name}:{mark[0]}:{mark[1]}" if isinstance(mark, tuple) else "-o" if mark else ""


def _is_override(document: Document, path: KeyPath) -> bool:
    return isinstance(document.mark(path), str)


def _drop(document: Document, path: KeyPath, raw: dict[KeyPath, str]) -> None:
    del document.get(path[:-1])[path[-1]]
    for table in (document.marks, raw):
        for known in [known for known in table if known[: len(path)] == path]:
            del table[known]


def _move(table: dict[KeyPath, Any], path: KeyPath, new_path: KeyPath) -> None:
    for known in [known for known in table if known[: len(path)] == path]:
        table[(*new_path, *known[len(path) :])] = table.pop(known)
