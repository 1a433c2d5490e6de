"""Where a configuration file holds components, and of which kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reinforge.config.document import Document, KeyPath
from reinforge.registry import Registry, TypedConfig

SECTIONS: dict[KeyPath, str] = {
    ("llms",): "llm",
    ("functions",): "workflow",
    ("eval", "evaluators"): "evaluator",
    ("trajectory_builders",): "trajectory_builder",
    ("trainer_adapters",): "trainer_adapter",
    ("trainers",): "trainer",
    ("finetuning", "trackers"): "tracker",
}
"""Sections whose entries are components, with the kind of component."""

SINGLES: dict[KeyPath, str] = {
    ("workflow",): "workflow",
    ("eval", "general", "dataset"): "dataset",
    ("finetuning", "algorithm"): "algorithm",
}
"""Keys whose value is itself a component, with its kind."""

STAGES: KeyPath = ("finetuning", "pipeline")
STAGE_COMPONENTS: dict[str, str] = {"algorithm": "algorithm"}
"""Keys of a stage of a pipeline whose value is a component, with its kind."""

BLOCKS: tuple[KeyPath, ...] = (*SECTIONS, ("eval",), ("eval", "general"), ("finetuning",), STAGES)
"""Keys for which null means the same as leaving them out: `functions:` with everything below it commented out."""


def iterate_components(document: Document) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yields the path, the kind and the value of each component in a document."""
    for section, kind in SECTIONS.items():
        entries = document.get(section)
        if isinstance(entries, dict):
            for name, value in entries.items():
                yield (*section, name), kind, value
    for path, kind in SINGLES.items():
        value = document.get(path)
        if value is not None:
            yield path, kind, value
    stages = document.get(STAGES)
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        for key, kind in STAGE_COMPONENTS.items() if isinstance(stage, dict) else ():
            if stage.get(key) is not None:
                yield (*STAGES, name, key), kind, stage[key]


def find_kind(path: KeyPath) -> str | None:
    """Returns the kind of the component at a path; None: there is none."""
    if len(path) == len(STAGES) + 2 and path[: len(STAGES)] == STAGES:
        return STAGE_COMPONENTS.get(str(path[-1]))
    return SINGLES.get(path) or SECTIONS.get(path[:-1])


def find_component(document: Document, path: KeyPath, registry: Registry) -> tuple[KeyPath, type[TypedConfig] | None]:
    """Returns the path and the class of the component that holds `path`; an empty path if none does."""
    for end in range(1, len(path)):
        kind = find_kind(path[:end])
        value = document.get(path[:end]) if kind else None
        if kind and isinstance(value, dict):
            component = registry.find(kind, str(value.get("_type")))
            return path[:end], component.config_type if component else None
    return (), None
