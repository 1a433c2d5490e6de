"""A YAML file, environment variables and `-o` overrides -> one validated `Config`, or every problem at once.

    finetune.yml ─► document (plain data, positions) ─► overrides ─► ${VAR} ─► components by `_type` ─► blocks
        ─► references

Each component's block becomes an instance of the class that is registered for its `_type`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reinforge.config.document import Document, KeyPath, apply_override, expand, format_path, parse_yaml
from reinforge.config.dump import is_literal_secret
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import fill_in_stages
from reinforge.config.problems import Validator
from reinforge.config.schema import Block, Config, FinetuneRunConfig
from reinforge.config.schema_walk import find_keys, iterate_values
from reinforge.config.sections import BLOCKS, SECTIONS, STAGES, check_references, iterate_components
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.limits import get_limits
from reinforge.registry import REGISTRY, Registry, load_named
from reinforge.safe_text import is_stand_in, remember_secret

logger = logging.getLogger(__name__)

DEFAULT_ALGORITHM = "grpo"


def load_config(
    path: str | Path | None,
    *,
    overrides: Iterable[tuple[str, str]] = (),
    changes: Iterable[tuple[str, str]] = (),
    registry: Registry | None = None,
    environ: Mapping[str, str] | None = None,
    project_root: Path | None = None,
    keep_going: bool = False,
) -> LoadedConfig:
    """Returns the validated configuration of a YAML file, or, without one, of the overrides alone.

    Args:
        overrides: Pairs of dotted path and YAML value; they take precedence over the file.
        changes: The same, of what the file stands for: an environment fills in its sections before. `${VAR}` is kept.
        environ: Variables for `${VAR}`; None: those of the process.
        project_root: Base of relative paths and of `module:name`; None: the file's folder.
        keep_going: Return what is left of a file with problems, with these as its `problems`, so that data and
            components can be validated as well.

    Raises:
        ConfigError: The file has problems; lists all of them, in the order of its lines. With `keep_going`: the file
            is not YAML, or nothing is left of it.
    """
    document = Document({})
    if path is not None:
        path = Path(path)
        try:
            with path.open("rb") as file:
                document = parse_yaml(file.read(get_limits().config_bytes + 1), str(path))
        except FileNotFoundError:
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            message = f"there is no file {path}{did_you_mean(path.name, beside)}"
            raise ConfigError(Problem("", message, f"check the path; it resolves to {path.absolute()}")) from None
        except OSError as error:
            raise ConfigError(Problem("", f"{path} cannot be read: {error.strerror}")) from error
        if document.data is None:
            document.data = {}
        if not isinstance(document.data, dict):
            found = "a list" if isinstance(document.data, list) else "a single value"
            document.report(
                (), f"expected a mapping of sections (llms, workflow, eval, finetuning, ...), found {found}"
            )
            raise ConfigError(document.problems)
    for override in overrides:
        _override(document, *override, registry or REGISTRY)
    document.data = expand(document, os.environ if environ is None else environ, document.data)
    loaded = _validate(document, registry or REGISTRY, path, changes, keep_going=keep_going)
    return loaded if project_root is None else replace(loaded, project_root=project_root)


def _override(document: Document, path_text: str, value_text: str, registry: Registry) -> None:
    if path_text.startswith("environment.") and isinstance(name := document.data.get("environment"), str):
        expand_name = load_named("reinforge.environments.sections:expand_name")
        document.data["environment"] = expand_name(name, registry)
    apply_override(document, path_text, value_text)


def build_config(
    data: Mapping[str, Any],
    *,
    registry: Registry | None = None,
    keep_going: bool = False,
    expanded_sections: Sequence[str] = (),
    overrides: Iterable[tuple[str, str]] = (),
    changes: Iterable[tuple[str, str]] = (),
) -> LoadedConfig:
    """Returns the validated configuration of data from Python.

    `${VAR}` is expanded in `expanded_sections` only. Instances of configuration classes may replace mappings with a
    `_type`, and functions may replace `module:name`. `keep_going`, `overrides` and `changes` are those of
    `load_config`.
    """
    document = Document(_copy_data(data))
    for override in overrides:
        _override(document, *override, registry or REGISTRY)
    for name in expanded_sections:
        if name in document.data:
            document.data[name] = expand(document, os.environ, document.data[name], (name,))
    return _validate(document, registry or REGISTRY, None, changes, keep_going=keep_going)


def resolve_aliases(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration, or part of one, with every key under its own name."""
    document = Document(_copy_data(data))
    validator = Validator(document, REGISTRY)
    for path, kind, value in iterate_components(document):
        if (component := REGISTRY.find(kind, _find_type(REGISTRY, kind, value))) is not None:
            validator.rename_aliases(find_keys(component.config_type, value, path).aliases)
    validator.rename_aliases(find_keys(Config, document.data).aliases)
    if document.problems:
        raise ConfigError(document.problems)
    return dict(document.data)


def _copy_data(value: Any) -> Any:
    if isinstance(value, Block):
        return {name: _copy_data(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Mapping):
        return {key: _copy_data(item) for key, item in value.items()}
    return [_copy_data(item) for item in value] if isinstance(value, list | tuple) else value


def _validate(
    document: Document, registry: Registry, path: Path | None, changes: Iterable[tuple[str, str]], *, keep_going: bool
) -> LoadedConfig:
    for *above, name in BLOCKS:
        block = document.get_block(tuple(above))
        if name in block and block[name] is None:
            del block[name]
    if document.data.get("environment") is not None:
        load_named("reinforge.environments.sections:fill_in")(document, registry)
    for change in changes:
        apply_override(document, *change)
    if document.get_block(STAGES):
        fill_in_stages(document)
    validator = Validator(document, registry)
    types: dict[KeyPath, str] = {}
    components: dict[KeyPath, BaseModel] = {}
    for key_path, kind, value in iterate_components(document):
        types[key_path] = name = _find_type(registry, kind, value)
        component = registry.find(kind, name) if name else None
        if component is None:
            _report_type(validator, key_path, kind, value)
        elif isinstance(value, BaseModel):
            components[key_path] = value
        elif (valid := validator.validate(component.config_type, key_path)) is not None:
            components[key_path] = valid
    config = validator.validate(Config, ())
    check_references(document)
    invalid = frozenset[KeyPath]()
    if keep_going and document.problems:
        from reinforge.config.partial import build_partial  # for a file with problems alone

        config, invalid = build_partial(document, components, registry)
    elif config is not None and not document.problems:
        for (*above, last), instance in components.items():
            fields: dict[Any, Any] = vars(config)
            for key in above:
                fields = fields[key] if isinstance(fields[key], dict) else vars(fields[key])
            fields[last] = instance
    else:
        raise ConfigError(document.problems or "the configuration could not be validated")
    if config.workflow is not None:
        types |= {("llms", name): config.llms[name].static_type or "" for name in config.workflow.add_llms(config.llms)}
    if (finetuning := config.finetuning).enabled:  # what a run uses is written into its resolved configuration
        finetuning.run_configuration = finetuning.run_configuration or FinetuneRunConfig()
        default = registry.find("algorithm", DEFAULT_ALGORITHM)
        if finetuning.algorithm is None and default is not None:
            finetuning.algorithm = default.config_type()
            types["finetuning", "algorithm"] = DEFAULT_ALGORITHM
    root = path.parent.resolve() if path else Path.cwd()
    data, placeholders, marks = document.data, document.placeholders, document.marks
    loaded = LoadedConfig(config, path, root, data, placeholders, types, marks, document.problems, invalid)
    _protect_secrets(loaded)
    return loaded


def _find_type(registry: Registry, kind: str, value: Any) -> str:
    """Returns the `_type` of a component, empty if it has none."""
    if isinstance(value, BaseModel):
        return registry.find_type_name(kind, type(value)) or ""
    name = value.get("_type") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _protect_secrets(loaded: LoadedConfig) -> None:
    """Keeps the secrets of a configuration out of messages and logs, and warns about those written in the file."""
    for path, value in iterate_values(loaded.config):
        is_typed = hasattr(value, "get_secret_value")
        secret = value.get_secret_value() if is_typed else value
        if is_typed or is_literal_secret(path, secret):
            text = secret.decode("utf-8", "replace") if isinstance(secret, bytes) else str(secret)
            remember_secret(text)
            if path not in loaded.placeholders and not is_stand_in(text) and not _is_expanded(loaded, text):
                where = f"{loaded.locate(format_path(path))} {format_path(path)}".strip()
                logger.warning("%s is written in the configuration; use ${VAR} and set the variable", where)


def _is_expanded(loaded: LoadedConfig, text: str) -> bool:
    """Returns True for the value of a variable, which a validator may have moved to another key."""
    document = Document(loaded.data)
    return any(str(document.get(path)) == text for path in loaded.placeholders)


def _report_type(validator: Validator, key_path: KeyPath, kind: str, value: Any) -> None:
    """Reports why a component has no type that is registered."""
    from reinforge.config.toolkit_names import find_toolkit_type

    document, registry = validator.document, validator.registry
    type_path = (*key_path, "_type")
    name = value.get("_type") if isinstance(value, dict) else None
    if isinstance(value, BaseModel):
        message = f"{type(value).__name__} is not the configuration of a registered {kind.replace('_', ' ')}"
        fix = f"use the configuration class of one of: {', '.join(registry.names(kind))}"
        document.report(key_path, message, fix)
    elif not isinstance(value, dict):
        message = f"expected a mapping with a `_type`, found {validator.format_value(key_path, value)}"
        document.report(key_path, message, f"write `_type: NAME`, with one of: {', '.join(registry.names(kind))}")
    elif name is None:
        _report_untyped(document, registry, key_path, kind, value)
    elif not isinstance(name, str):
        document.report(type_path, f"expected a name, found {validator.format_value(type_path, name)}")
    elif (problem := find_toolkit_type(kind, name, key_path)) is not None:
        document.report_at(document.mark(type_path), problem)
    else:
        try:
            registry.get(kind, name, format_path(key_path))
        except ConfigError as error:
            for problem in error.problems:
                document.report_at(document.mark(type_path), problem)


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
