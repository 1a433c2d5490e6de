"""A YAML file, environment variables and `-o` overrides -> one checked `Config`; every problem at once.

    finetune.yml ─► document (plain data, marks) ─► overrides ─► ${VAR} ─► components by `_type`, blocks ─► references

Each component's block is checked by the class that the registry has for its `_type` and stored as its instance.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reinforge.config.document import MAX_BYTES, Document, KeyPath, dotted, parse_yaml
from reinforge.config.dump import dump_config as dump_config
from reinforge.config.environment import expand
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.overrides import apply_override
from reinforge.config.problems import Checker
from reinforge.config.references import check_references
from reinforge.config.schema import Block, Config
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.registry import REGISTRY, Registry

SECTIONS: dict[KeyPath, str] = {
    ("llms",): "llm",
    ("functions",): "workflow",
    ("eval", "evaluators"): "evaluator",
    ("trajectory_builders",): "trajectory_builder",
    ("trainer_adapters",): "trainer_adapter",
    ("trainers",): "trainer",
}
"""Where each entry is a component, and of which kind."""

SINGLES: dict[KeyPath, str] = {
    ("workflow",): "workflow",
    ("eval", "general", "dataset"): "dataset",
    ("finetuning", "algorithm"): "algorithm",
}
"""Where the value itself is a component."""

BLOCKS: tuple[KeyPath, ...] = (*SECTIONS, ("eval",), ("eval", "general"), ("finetuning",))
"""Where nothing (`functions:` and all below it commented out) means what an absent key means."""


def load_config(
    path: str | Path,
    *,
    overrides: Iterable[tuple[str, str]] = (),
    registry: Registry = REGISTRY,
    environ: Mapping[str, str] = os.environ,
    project_root: Path | None = None,
) -> LoadedConfig:
    """Returns the checked configuration of a YAML file.

    Args:
        path: The file.
        overrides: Pairs of dotted path and YAML value; they win over the file.
        registry: Where component types are looked up.
        environ: Variables for `${VAR}`.
        project_root: Where relative paths and `module:name` start; None: the file's folder.

    Raises:
        ConfigError: With every problem of the file, in the order of its lines.
    """
    path = Path(path)
    document = parse_yaml(_read(path), str(path))
    if document.data is None:
        document.data = {}
    if not isinstance(document.data, dict):
        document.report((), "a configuration is a mapping of sections (llms, workflow, eval, finetuning, ...)")
        document.raise_problems()
    for override in overrides:
        apply_override(document, *override)
    placeholders = expand(document, environ)
    loaded = _check(document, placeholders, registry, path)
    return loaded if project_root is None else replace(loaded, project_root=project_root)


def build_config(data: Mapping[str, Any], *, registry: Registry = REGISTRY) -> LoadedConfig:
    """Returns the checked configuration of data that was made in Python.

    Values mean what they say: `${VAR}` is not expanded. Instances of configuration classes may stand in place of
    mappings with a `_type`, and functions in place of `module:name`.

    Raises:
        ConfigError: With every problem.
    """
    return _check(Document(_copied(data)), {}, registry, None)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        message = f"there is no file {path}{did_you_mean(path.name, beside)}"
        raise ConfigError(Problem("", message, f"looked for {path.absolute()}")) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(Problem("", "the file is not UTF-8", "save it as UTF-8", f"{path}:{line}")) from None
    except OSError as error:
        raise ConfigError(Problem("", f"{path} cannot be read: {error.strerror}")) from error


def _copied(value: Any) -> Any:
    if isinstance(value, Block):
        return {name: _copied(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _check(document: Document, placeholders: dict[KeyPath, str], registry: Registry, path: Path | None) -> LoadedConfig:
    for block in BLOCKS:
        above = document.get(block[:-1])
        if isinstance(above, dict) and block[-1] in above and above[block[-1]] is None:
            del above[block[-1]]
    checker = Checker(document, placeholders)
    blocks = _copied(document.data)
    types: dict[KeyPath, str] = {}
    for place, kind, value in _components(document):
        name, instance = _check_component(checker, registry, place, kind, value)
        types[place] = name
        _put(blocks, place, instance)
    config = checker.check(Config, blocks, ())
    check_references(document)
    document.raise_problems()
    if config is None:
        raise ConfigError("the configuration could not be checked")
    root = path.parent.resolve() if path else Path.cwd()
    return LoadedConfig(config, path, root, document.data, placeholders, types, document.marks)


def _components(document: Document) -> Iterator[tuple[KeyPath, str, Any]]:
    for section, kind in SECTIONS.items():
        entries = document.get(section)
        if isinstance(entries, dict):
            for name, value in entries.items():
                yield (*section, name), kind, value
    for place, kind in SINGLES.items():
        value = document.get(place)
        if value is not None:
            yield place, kind, value


def _put(blocks: Any, place: KeyPath, instance: Any) -> None:
    for key in place[:-1]:
        blocks = blocks[key]
    blocks[place[-1]] = instance


def _check_component(
    checker: Checker, registry: Registry, place: KeyPath, kind: str, value: Any
) -> tuple[str, BaseModel | None]:
    """Returns the `_type` of a component and its checked configuration; None where problems were noted."""
    document = checker.document
    if isinstance(value, BaseModel):
        return _name_of_instance(document, registry, place, kind, value), value
    if not isinstance(value, dict):
        message = f"expected a mapping with a `_type`, found {checker.shown(place, value)}"
        document.report(place, message, f"registered: {', '.join(registry.names(kind))}")
        return "", None
    name = value.get("_type")
    if name is None:
        _report_untyped(document, registry, place, kind, value)
        return "", None
    if not isinstance(name, str):
        document.report((*place, "_type"), f"expected a name, found {checker.shown((*place, '_type'), name)}")
        return "", None
    try:
        component = registry.get(kind, name, dotted(place))
    except ConfigError as error:
        for problem in error.problems:
            document.report_at(document.mark((*place, "_type")), problem)
        return name, None
    settings = {key: item for key, item in value.items() if key != "_type"}
    return name, checker.check(component.config_type, settings, place)


def _name_of_instance(document: Document, registry: Registry, place: KeyPath, kind: str, value: BaseModel) -> str:
    for component in registry.components(kind):
        if component.config_type is type(value):
            return component.name
    message = f"{type(value).__name__} is not the configuration of a registered {kind.replace('_', ' ')}"
    document.report(place, message, f"registered: {', '.join(registry.names(kind))}")
    return ""


def _report_untyped(document: Document, registry: Registry, place: KeyPath, kind: str, value: dict[str, Any]) -> None:
    section, name = place[:-1], str(place[-1])
    if section in SECTIONS and isinstance(document.marks.get(place), str):  # an override misspelt an entry's name
        entries = [key for key in document.get(section) if not isinstance(document.marks.get((*section, key)), str)]
        have = f"it has {', '.join(entries)}" if entries else "it has none"
        message = f'{dotted(section)} has no entry "{name}"{did_you_mean(name, entries) or ";"} {have}'
        document.report(place, message, f"to add it, give its type first: -o {dotted(place)}._type NAME")
        return
    message = f'the required key "_type" is missing; registered: {", ".join(registry.names(kind)) or "none"}'
    nearest = next((key for key in ("type", "type_", "_Type", "__type") if key in value), None)
    document.report(place, message, f'rename "{nearest}" to "_type"' if nearest else 'add "_type"')
