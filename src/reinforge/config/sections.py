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
    ("environment",): "environment",
    ("eval", "general", "dataset"): "dataset",
    ("finetuning", "algorithm"): "algorithm",
}
"""Keys whose value is itself a component, with its kind."""

STAGES: KeyPath = ("finetuning", "pipeline")
STAGE_COMPONENTS: dict[str, str] = {"algorithm": "algorithm"}
"""Keys of a stage of a pipeline whose value is a component, with its kind."""

BLOCKS: tuple[KeyPath, ...] = (*SECTIONS, ("eval",), ("eval", "general"), ("finetuning",), STAGES, ("prompts",))
"""Keys for which null means the same as leaving them out: `functions:` with everything below it commented out."""


def iterate_components(document: Document) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yields the path, the kind and the value of each component in a document."""
    for section, kind in SECTIONS.items():
        for name, value in document.get_block(section).items():
            yield (*section, name), kind, value
    for (*above, key), kind in SINGLES.items():
        value = document.get_block(tuple(above)).get(str(key))
        if value is not None:
            yield (*above, key), kind, value
    for name in document.get_block(STAGES):
        stage = document.get_block((*STAGES, name))
        for key, kind in STAGE_COMPONENTS.items():
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


LOGS = "logs"  # the reference of a verdict that are the replies recorded in the rows
EVALUATORS: KeyPath = ("eval", "evaluators")
GATE_REFERENCE: KeyPath = ("finetuning", "gate", "reference")
GUARDS: KeyPath = ("finetuning", "gate", "guard_metrics")
REFERENCES: dict[KeyPath, KeyPath] = {
    ("finetuning", "trainer"): ("trainers",),
    ("finetuning", "trajectory_builder"): ("trajectory_builders",),
    ("finetuning", "trainer_adapter"): ("trainer_adapters",),
    ("finetuning", "reward_function", "name"): EVALUATORS,
    ("finetuning", "gate", "metric"): EVALUATORS,
}
"""Keys whose value is the name of an entry, with the section that has it."""

REQUIRED: dict[KeyPath, str] = {
    ("finetuning", "trainer"): 'add "trainer": an entry of trainers',
    ("finetuning", "trajectory_builder"): 'add "trajectory_builder": an entry of trajectory_builders',
    ("finetuning", "trainer_adapter"): 'add "trainer_adapter": an entry of trainer_adapters',
    ("finetuning", "reward_function"): 'add "reward_function": a block whose `name` is an entry of eval.evaluators',
    ("workflow",): "add workflow with a `_type`: the agent",
    ("eval", "general", "dataset"): "add eval.general.dataset with a `_type`: the examples",
}
"""What a run needs, with the fix."""


def check_references(document: Document) -> None:
    """Reports names that refer to no entry, and what is missing when fine-tuning is enabled.

    Works on the data as written, so that these problems appear together with those of the schema.
    """
    finetuning = document.get_block(("finetuning",))
    of_stages = {(*STAGES, name, "trajectory_builder"): ("trajectory_builders",) for name in document.get_block(STAGES)}
    for path, section in {**REFERENCES, **of_stages}.items():
        name, entries = document.get_block(path[:-1]).get(str(path[-1])), document.get_block(section)
        if isinstance(name, str) and name not in entries:
            _report_missing(document, path, name, format_path(section), list(entries))
    evaluators = document.get_block(EVALUATORS)
    for name in document.get_block(GUARDS):
        if name not in evaluators:
            _report_missing(document, (*GUARDS, name), name, format_path(EVALUATORS), list(evaluators))
    target, llms = finetuning.get("target_model"), document.get_block(("llms",))
    models = [entry.get("model_name") for entry in llms.values() if isinstance(entry, dict)]
    if isinstance(target, str) and target not in llms and target not in models:
        allowed = [*llms, *(model for model in models if isinstance(model, str))]
        _report_missing(document, ("finetuning", "target_model"), target, "llms", allowed)
    others = [f"llms.{name}" for name, each in llms.items() if isinstance(each, dict) and each.get("_type") != "policy"]
    reference = document.get_block(GATE_REFERENCE[:-1]).get(str(GATE_REFERENCE[-1]))
    if isinstance(reference, str) and reference not in (LOGS, *others):
        message = f'expected logs or an entry of llms that is not the policy, found "{reference}"'
        document.report(GATE_REFERENCE, message, f"use {', '.join((LOGS, *others))}")
    if str(finetuning.get("enabled")).lower() in ("true", "1", "yes", "on"):
        for path, fix in REQUIRED.items():
            if document.get_block(path[:-1]).get(str(path[-1])) is None:
                message = f'the required key "{path[-1]}" is missing, since finetuning is enabled'
                document.report(path, message, fix, at=path[:-1])


def _report_missing(document: Document, path: KeyPath, name: str, section: str, allowed: list[str]) -> None:
    have = f"it has {', '.join(allowed)}" if allowed else "it has none"
    hint = did_you_mean(name, allowed)
    fix = f"add {name} to {section}" + (", or use one of these" if allowed else "")
    document.report(path, f'{section} has no entry "{name}"{hint or ";"} {have}', fix)
