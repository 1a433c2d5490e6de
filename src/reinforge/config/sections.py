"""Where a configuration file holds components, and of which kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reinforge.config.document import Document, KeyPath, format_path
from reinforge.errors import did_you_mean
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


FINETUNING = "finetuning"
EVALUATORS = ("eval", "evaluators")
REQUIRED = {
    ("trainer",): "an entry of trainers",
    ("trajectory_builder",): "an entry of trajectory_builders",
    ("trainer_adapter",): "an entry of trainer_adapters",
    ("reward_function",): "a block whose `name` is an entry of eval.evaluators",
}


def check_references(document: Document) -> None:
    """Reports names that refer to no entry, and what is missing when fine-tuning is enabled.

    Works on the data as written, so that these problems appear together with those of the schema.
    """
    for path, name, section in _references(document):
        entries = _entries(document, section)
        if name not in entries:
            _report_missing(document, path, name, format_path(section), list(entries))
    target = document.get((FINETUNING, "target_model"))
    llms = _entries(document, ("llms",))
    if isinstance(target, str):
        models = [entry.get("model_name") for entry in llms.values() if isinstance(entry, dict)]
        if target not in llms and target not in models:
            allowed = [*llms, *(model for model in models if isinstance(model, str))]
            _report_missing(document, (FINETUNING, "target_model"), target, "llms", allowed)
    if str(document.get((FINETUNING, "enabled"))).lower() in ("true", "1", "yes", "on"):
        _check_enabled(document)


def _references(document: Document) -> Iterator[tuple[KeyPath, str, KeyPath]]:
    """Yields each reference: its path, the name, and the section that must have an entry of that name."""
    candidates: list[tuple[KeyPath, KeyPath]] = [
        ((FINETUNING, "trainer"), ("trainers",)),
        ((FINETUNING, "trajectory_builder"), ("trajectory_builders",)),
        ((FINETUNING, "trainer_adapter"), ("trainer_adapters",)),
        ((FINETUNING, "reward_function", "name"), EVALUATORS),
        ((FINETUNING, "gate", "metric"), EVALUATORS),
    ]
    for path, section in candidates:
        name = document.get(path)
        if isinstance(name, str):
            yield path, name, section
    for stage in _entries(document, STAGES):
        name = document.get((*STAGES, stage, "trajectory_builder"))
        if isinstance(name, str):
            yield (*STAGES, stage, "trajectory_builder"), name, ("trajectory_builders",)
    guards = (FINETUNING, "gate", "guard_metrics")
    for name in _entries(document, guards):
        yield (*guards, name), name, EVALUATORS


def _report_missing(document: Document, path: KeyPath, name: str, section: str, allowed: list[str]) -> None:
    have = f"it has {', '.join(allowed)}" if allowed else "it has none"
    hint = did_you_mean(name, allowed)
    fix = f"add {name} to {section}" + (", or use one of these" if allowed else "")
    document.report(path, f'{section} has no entry "{name}"{hint or ";"} {have}', fix)


def _check_enabled(document: Document) -> None:
    for path, value in REQUIRED.items():
        if document.get((FINETUNING, *path)) is None:
            message = f'the required key "{path[0]}" is missing, since finetuning is enabled'
            document.report((FINETUNING, *path), message, f'add "{path[0]}": {value}', at=(FINETUNING,))
    for needed, meaning in ((("workflow",), "the agent"), (("eval", "general", "dataset"), "the examples")):
        if document.get(needed) is None:
            message = f'the required key "{needed[-1]}" is missing, since finetuning is enabled'
            fix = f"add {format_path(needed)} with a `_type`: {meaning}"
            document.report(needed, message, fix, at=needed[:-1])


def _entries(document: Document, section: KeyPath) -> dict[str, Any]:
    value = document.get(section)
    return value if isinstance(value, dict) else {}
