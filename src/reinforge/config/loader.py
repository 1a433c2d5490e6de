"""A YAML file, environment variables and `-o` overrides -> one validated `Config`, or every problem at once.

    finetune.yml ─► document (plain data, positions) ─► overrides ─► ${VAR} ─► aliases of keys
        ─► components by `_type`, blocks ─► references

Each component's block becomes an instance of the class that is registered for its `_type`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reinforge.config.document import Document, KeyPath, expand, format_path, parse_yaml
from reinforge.config.dump import dump_config as dump_config
from reinforge.config.dump import protect_secrets, report_secrets_in_urls
from reinforge.config.fields import find_aliases
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import fill_in_stages
from reinforge.config.problems import Validator
from reinforge.config.schema import Block, Config
from reinforge.config.sections import BLOCKS, SECTIONS, check_references, iterate_components
from reinforge.config.toolkit_names import find_toolkit_type
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.limits import get_limits
from reinforge.registry import REGISTRY, Registry
from reinforge.types.key_aliases import ConfigModel, describe_conflict


def apply_override(document: Document, path_text: str, value_text: str) -> None:
    """Sets the value at `a.b.0` (keys and indices) to a YAML value; the schema check finds unknown paths."""
    mark = f"-o {path_text}"
    keys: list[str | int] = list(path_text.split("."))
    if not all(keys):
        fix = "join the keys with single dots, for example: -o finetuning.num_epochs 5"
        document.report_at(mark, Problem("", f'"{path_text}" is not a path', fix))
        return
    try:
        value = parse_yaml(value_text).data
    except ConfigError as error:
        for problem in error.problems:
            fix = "quote the value twice, for the shell and for YAML: -o PATH '\"text\"'"
            document.report_at(mark, Problem(path_text, problem.message, fix))
        return
    container: Any = document.data
    for depth, key in enumerate(keys):
        above: KeyPath = tuple(keys[:depth])
        if isinstance(container, list):
            if not str(key).isdigit() or int(key) >= len(container):
                allowed = f"0 to {len(container) - 1}" if container else "none, since the list is empty"
                document.report_at(
                    mark, Problem(path_text, f'"{key}" is not an index of this list; allowed: {allowed}')
                )
                return
            key = keys[depth] = int(key)
        elif not isinstance(container, dict):
            where = ".".join(map(str, above))
            document.report_at(mark, Problem(path_text, f"{where} is a single value and has no keys"))
            return
        if depth == len(keys) - 1:
            container[key] = value
            break
        if isinstance(container, dict) and container.get(str(key)) is None:
            container[key] = {}
            document.marks[*above, key] = mark
        container = container[key]
    _mark_value(document, tuple(keys), mark)


def _mark_value(document: Document, path: KeyPath, mark: str) -> None:
    for known in [known for known in document.marks if known[: len(path)] == path]:
        del document.marks[known]
    document.marks[path] = mark


def load_config(
    path: str | Path,
    *,
    overrides: Iterable[tuple[str, str]] = (),
    registry: Registry | None = None,
    environ: Mapping[str, str] | None = None,
    project_root: Path | None = None,
    keep_going: bool = False,
) -> LoadedConfig:
    """Returns the validated configuration of a YAML file.

    Args:
        overrides: Pairs of dotted path and YAML value; they take precedence over the file.
        environ: Variables for `${VAR}`; None: those of the process.
        project_root: Base of relative paths and of `module:name`; None: the file's folder.
        keep_going: Return what is left of a file with problems, with these as its `problems`, so that data and
            components can be validated as well.

    Raises:
        ConfigError: The file has problems; lists all of them, in the order of its lines. With `keep_going`: the file
            is not YAML, or nothing is left of it.
    """
    path = Path(path)
    document = parse_yaml(_read(path), str(path))
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        found = "a list" if isinstance(document.data, list) else "a single value"
        document.report((), f"expected a mapping of sections (llms, workflow, eval, finetuning, ...), found {found}")
        document.raise_problems()
    for override in overrides:
        apply_override(document, *override)
    placeholders = expand(document, os.environ if environ is None else environ)
    report_secrets_in_urls(document, placeholders)
    loaded = _validate(document, placeholders, registry or REGISTRY, path, keep_going=keep_going)
    protect_secrets(loaded)
    return loaded if project_root is None else replace(loaded, project_root=project_root)


def build_config(
    data: Mapping[str, Any],
    *,
    registry: Registry | None = None,
    keep_going: bool = False,
    expanded_sections: Sequence[str] = (),
) -> LoadedConfig:
    """Returns the validated configuration of data from Python.

    `${VAR}` is expanded in `expanded_sections` only. Instances of configuration classes may replace mappings with a
    `_type`, and functions may replace `module:name`. `keep_going` is that of `load_config`.
    """
    document = Document(_copy_data(data))
    sections = Document({name: document.data[name] for name in expanded_sections if name in document.data})
    placeholders = expand(sections, os.environ)
    sections.raise_problems()
    document.data.update(sections.data)
    loaded = _validate(document, placeholders, registry or REGISTRY, None, keep_going=keep_going)
    protect_secrets(loaded)
    return loaded


def resolve_aliases(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration, or part of one, with every key under its own name."""
    document = Document(_copy_data(data))
    _rename_aliases(document, REGISTRY, {})
    document.raise_problems()
    return dict(document.data)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(get_limits().config_bytes + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        message = f"there is no file {path}{did_you_mean(path.name, beside)}"
        raise ConfigError(Problem("", message, f"check the path; it resolves to {path.absolute()}")) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(Problem("", "the file is not UTF-8", "save it as UTF-8", f"{path}:{line}")) from None
    except OSError as error:
        raise ConfigError(Problem("", f"{path} cannot be read: {error.strerror}")) from error


def _copy_data(value: Any) -> Any:
    if isinstance(value, Block):
        return {name: _copy_data(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {key: _copy_data(item) for key, item in value.items()}
    return [_copy_data(item) for item in value] if isinstance(value, list | tuple) else value


def _validate(
    document: Document,
    placeholders: dict[KeyPath, str],
    registry: Registry,
    path: Path | None,
    *,
    keep_going: bool,
) -> LoadedConfig:
    for block in BLOCKS:
        above = document.get(block[:-1])
        if isinstance(above, dict) and block[-1] in above and above[block[-1]] is None:
            del above[block[-1]]
    _rename_aliases(document, registry, placeholders)
    fill_in_stages(document, placeholders)
    validator = Validator(document, placeholders, registry)
    blocks = _copy_data(document.data)
    types: dict[KeyPath, str] = {}
    for key_path, kind, value in iterate_components(document):
        name, instance = _validate_component(validator, registry, key_path, kind, value)
        types[key_path] = name
        _put(blocks, key_path, instance)
    config = validator.validate(Config, blocks, ())
    check_references(document)
    invalid = frozenset[KeyPath]()
    left = None
    if keep_going and document.problems:
        from reinforge.config.partial import build_partial  # for a file with problems alone

        left = build_partial(document, blocks, registry)
    if left is not None:
        config, invalid = left
    else:
        document.raise_problems()
    if config is None:
        raise ConfigError("the configuration could not be validated")
    root = path.parent.resolve() if path else Path.cwd()
    data, marks = document.data, document.marks
    return LoadedConfig(config, path, root, data, placeholders, types, marks, document.problems, invalid)


def _rename_aliases(document: Document, registry: Registry, raw: dict[KeyPath, str]) -> None:
    """Renames the keys of a document that are spelled by an alias, with their marks and their text with `${VAR}`.

    An override takes precedence over another spelling of its key in the file. Two spellings of a key that are both in
    the file, or both set by `-o`, are reported as a problem.
    """
    aliases: dict[KeyPath, type[ConfigModel]] = {}
    for path, kind, value in iterate_components(document):
        name = value.get("_type") if isinstance(value, dict) else None
        component = registry.find(kind, name) if isinstance(name, str) else None
        if component is not None:
            aliases |= find_aliases(component.config_type, value, path)
    aliases |= find_aliases(Config, document.data)
    for path, config_type in aliases.items():
        block, name = document.get(path[:-1]), str(path[-1])
        key = config_type.key_aliases[name]
        new_path = (*path[:-1], key)
        if key in block:
            overrides, is_overridden = (isinstance(document.mark(each), str) for each in (path, new_path))
            if overrides == is_overridden:
                document.report(path, describe_conflict(name, key, key), f'remove "{name}"')
            alias_wins = overrides and not is_overridden
            _drop(document, new_path if alias_wins else path, raw)
            if not alias_wins:
                continue
        items = [(key if each == name else each, value) for each, value in block.items()]
        block.clear()
        block.update(items)
        tables: tuple[dict[KeyPath, Any], ...] = (document.marks, raw)
        for table in tables:
            for known in [known for known in table if known[: len(path)] == path]:
                table[(*new_path, *known[len(path) :])] = table.pop(known)


def _drop(document: Document, path: KeyPath, raw: dict[KeyPath, str]) -> None:
    del document.get(path[:-1])[path[-1]]
    for table in (document.marks, raw):
        for known in [known for known in table if known[: len(path)] == path]:
            del table[known]


def _put(blocks: Any, key_path: KeyPath, instance: Any) -> None:
    for key in key_path[:-1]:
        blocks = blocks[key]
    blocks[key_path[-1]] = instance


def _validate_component(
    validator: Validator, registry: Registry, key_path: KeyPath, kind: str, value: Any
) -> tuple[str, BaseModel | None]:
    """Returns the `_type` of a component and its validated configuration, or None if problems were reported."""
    document = validator.document
    if isinstance(value, BaseModel):
        return _find_type_name(document, registry, key_path, kind, value), value
    if not isinstance(value, dict):
        message = f"expected a mapping with a `_type`, found {validator.format_value(key_path, value)}"
        document.report(key_path, message, f"write `_type: NAME`, with one of: {', '.join(registry.names(kind))}")
        return "", None
    name = value.get("_type")
    if name is None:
        _report_untyped(document, registry, key_path, kind, value)
        return "", None
    if not isinstance(name, str):
        document.report(
            (*key_path, "_type"), f"expected a name, found {validator.format_value((*key_path, '_type'), name)}"
        )
        return "", None
    if registry.find(kind, name) is None and (problem := find_toolkit_type(kind, name, key_path)) is not None:
        document.report_at(document.mark((*key_path, "_type")), problem)
        return name, None
    try:
        component = registry.get(kind, name, format_path(key_path))
    except ConfigError as error:
        for problem in error.problems:
            document.report_at(document.mark((*key_path, "_type")), problem)
        return name, None
    settings = {key: item for key, item in value.items() if key != "_type"}
    return name, validator.validate(component.config_type, settings, key_path)


def _find_type_name(document: Document, registry: Registry, key_path: KeyPath, kind: str, value: BaseModel) -> str:
    if (name := registry.find_type_name(kind, type(value))) is not None:
        return name
    message = f"{type(value).__name__} is not the configuration of a registered {kind.replace('_', ' ')}"
    fix = f"use the configuration class of one of: {', '.join(registry.names(kind))}"
    document.report(key_path, message, fix)
    return ""


def _report_untyped(
    document: Document, registry: Registry, key_path: KeyPath, kind: str, value: dict[str, Any]
) -> None:
    section, name = key_path[:-1], str(key_path[-1])
    is_override = isinstance(document.marks.get(key_path), str)
    if section in SECTIONS and is_override:  # it misspelled the name of an entry
        entries = [key for key in document.get(section) if not isinstance(document.marks.get((*section, key)), str)]
        have = f"it has {', '.join(entries)}" if entries else "it has none"
        message = f'{format_path(section)} has no entry "{name}"{did_you_mean(name, entries) or ";"} {have}'
        document.report(key_path, message, f"to add it, set its type first: -o {format_path(key_path)}._type NAME")
        return
    message = f'the required key "_type" is missing; registered: {", ".join(registry.names(kind)) or "none"}'
    nearest = next((key for key in ("type", "type_", "_Type", "__type") if key in value), None)
    document.report(key_path, message, f'rename "{nearest}" to "_type"' if nearest else 'add "_type"')
