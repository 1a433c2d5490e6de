"""What is left of a configuration with problems: invalid components are marked, other invalid keys have their defaults.

    trainers: {t: {_type: epoch}}              a component without problems stays unchanged
    trainer_adapters: {a: {_type: locl}}       is in `invalid`; a stand-in keeps its name, for references to it
    finetuning: {num_epoch: 3, seed: 1}        the unknown key is left out, seed is 1

Data and components are validated on it, so that everything that is wrong is reported at once. Nothing ever runs on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from reinforge.config.document import Document, KeyPath, format_path
from reinforge.config.schema import (
    PARTIAL,
    AlgorithmConfig,
    Config,
    DatasetConfig,
    EnvironmentConfig,
    EvaluatorConfig,
    LLMConfig,
    TrackerConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)
from reinforge.config.sections import SINGLES, find_kind, iterate_components
from reinforge.errors import ConfigError
from reinforge.registry import Registry, TypedConfig

NEEDED: tuple[KeyPath, ...] = (("workflow",), ("eval", "general", "dataset"))
"""Components that every run needs; there is no default for them."""

BASES: dict[str, type[TypedConfig]] = {
    "llm": LLMConfig,
    "workflow": WorkflowConfig,
    "dataset": DatasetConfig,
    "environment": EnvironmentConfig,
    "evaluator": EvaluatorConfig,
    "trajectory_builder": TrajectoryBuilderConfig,
    "trainer_adapter": TrainerAdapterConfig,
    "trainer": TrainerConfig,
    "algorithm": AlgorithmConfig,
    "tracker": TrackerConfig,
}
"""What stands in for a component of which too little is valid, by kind; it has no `static_type`."""

MAX_ROUNDS = 16  # how often invalid keys are removed; removing some can show others, above them


def build_partial(
    document: Document, valid: Mapping[KeyPath, BaseModel], registry: Registry
) -> tuple[Config, frozenset[KeyPath]]:
    """Returns a configuration without what is invalid, and the paths of invalid components.

    Args:
        valid: The components without problems.
    """
    reported = {problem.path for problem in document.problems}
    places = {path: value for path, _, value in iterate_components(document)}
    components = [*places, *(path for path in SINGLES if path not in places)]
    invalid = frozenset(
        path for path in components if _has_problem(path, reported) or (path in NEEDED and path not in places)
    )
    data = _copy(document.data, (), reported, keep=frozenset(components))
    for path, value in places.items():
        if path in invalid and value is not None:
            _set(data, path, _make_stand_in(path, value, reported, registry))
        elif path in valid:
            _set(data, path, valid[path])
    for _ in range(MAX_ROUNDS):
        try:
            return Config.model_validate(data, context={PARTIAL: True}), invalid
        except ValidationError as error:
            removed = [_remove(data, details["loc"]) for details in error.errors(include_url=False)]
            if not any(removed):
                break
    raise ConfigError(document.problems)


def _has_problem(path: KeyPath, reported: set[str]) -> bool:
    name = format_path(path)
    return any(each == name or each.startswith(f"{name}.") for each in reported)


def _copy(value: Any, path: KeyPath, reported: set[str], keep: frozenset[KeyPath]) -> Any:
    """Returns plain data without the keys that have problems of their own; components stay."""
    if not isinstance(value, dict):
        return value
    return {
        key: item if (*path, key) in keep else _copy(item, (*path, key), reported, keep)
        for key, item in value.items()
        if (*path, key) in keep or format_path((*path, key)) not in reported
    }


def _make_stand_in(path: KeyPath, value: Any, reported: set[str], registry: Registry) -> TypedConfig:
    """Returns an instance with the settings that are valid; one without a type if they are not enough for its class."""
    kind = find_kind(path)
    assert kind is not None  # `iterate_components` yielded the path
    if isinstance(value, TypedConfig):
        return value
    given = value if isinstance(value, dict) else {}
    component = registry.find(kind, str(given.get("_type")))
    if component is None:
        return BASES[kind]()
    fields = component.config_type.model_fields
    valid = {name: item for name, item in given.items() if name in fields and not _has_problem((*path, name), reported)}
    try:
        return component.config_type.model_validate(valid)
    except Exception:  # noqa: BLE001  a validator of a user's class may raise anything, and its problem is reported
        return BASES[kind]()


def _set(data: Any, path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data, dict) or key not in data:
            return
        data = data[key]
    if isinstance(data, dict):
        data[path[-1]] = value


def _remove(data: Any, location: tuple[str | int, ...]) -> bool:
    """Removes the key at a location of an error, or the innermost one above it; returns False if there is none."""
    found: tuple[dict[Any, Any], str | int] | None = None
    for key in location:
        if not isinstance(data, dict) or key not in data:
            break
        found, data = (data, key), data[key]
    if found is not None:
        del found[0][found[1]]
    return found is not None
