"""Builds and validates the stages of a pipeline: algorithm, trajectory builder and training examples of each.

A problem that a component reports about `finetuning.algorithm` is located at the stage's own algorithm, if it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.pipeline import PipelineStage, list_stages
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.contamination import MAX_COPIES, SHARED_SHARE, read_question, split_runs
from reinforge.evaluation.run import HELD_OUT
from reinforge.evaluation.splits import group_by_column
from reinforge.files import to_json
from reinforge.interfaces import TrainerAdapter, TrajectoryBuilder
from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilderConfig
from reinforge.trainer.builders.staged import StagedTrajectoryBuilder, StageParts, describe_epochs, name_train_split
from reinforge.trainer.setup.components import DATASET, Attempts, ComponentBuilder
from reinforge.types.evaluation import EvalInputItem

ALGORITHM = "finetuning.algorithm"

Splits = dict[str, list[EvalInputItem]]


@dataclass(frozen=True, slots=True)
class StageData:
    items: list[EvalInputItem]
    row_locations: dict[str, str] = field(default_factory=dict)
    """File and line of each by its id, as far as the loader knows them."""


class HeldOutPrompts:
    """The prompts of held-out examples, to find rows with the same ones in whatever shape.

    held out "What is 2 + 2?"; row [system, user "What is 2 + 2?", assistant "4", user "Why?", assistant "Because."]
    =>  it matches, since its first reply would be trained

    Args:
        group_key: Column whose equal values relate rows, such as the conversation; None: there is none.
    """

    def __init__(self, items: Sequence[EvalInputItem], group_key: str | None):
        self._group_key, self._related = group_key, set(group_by_column(items, group_key))
        self._inputs = {to_json([item.input_obj]) for item in items}
        counts = Counter(split_runs(read_question(item.input_obj)) for item in items)
        limit = max(MAX_COPIES, SHARED_SHARE * len(items))  # the one rule of a game makes no example
        self._questions = {question for question, count in counts.items() if question and count <= limit}

    def match(self, item: EvalInputItem) -> bool:
        """Returns True if a row has a reply to a held-out prompt, or belongs to a held-out conversation."""
        prompts = list(_list_prompts(item.input_obj))
        return (
            any(to_json([prompt]) in self._inputs for prompt in prompts)
            or any(split_runs(read_question(prompt)) in self._questions for prompt in prompts)
            or bool(self._related & group_by_column([item], self._group_key).keys())
        )


def _list_prompts(input_obj: Any) -> Iterable[Any]:
    """Yields what each reply of a row answers: [user, assistant, user] -> [user] and all three."""
    messages = input_obj if isinstance(input_obj, list) else []
    for place, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            yield messages[:place]
    yield input_obj


async def build_stages(
    builder: ComponentBuilder,
    splits: Splits | None,
    row_locations: Mapping[str, str],
    attempt: Attempts,
    *,
    is_known: bool = True,
) -> StagedTrajectoryBuilder | None:
    """Args:
    splits: The run's examples; those of stages with a dataset of their own are added. None: they have problems.
    is_known: The settings of the agent and of the models are valid, so the stages can be validated against them.
    """
    whole = list[StageParts]()
    stages = list_stages(builder.config.finetuning)
    for stage in stages:
        parts = await _build_parts(builder, stage, attempt)
        data = await _find_data(builder, stage, splits, row_locations, attempt)
        if parts is None:
            continue
        whole.append(parts)
        if is_known:
            problems = parts.builder.validate(builder.config, parts.algorithm, data.items, data.row_locations)
            place = f"trajectory_builders.{_name_builder(builder, stage)}"
            attempt.add(builder.locate(_move(each, stage), place) for each in problems)
    return StagedTrajectoryBuilder(whole) if len(whole) == len(stages) else None


def _name_builder(builder: ComponentBuilder, stage: PipelineStage) -> str | None:
    return stage.settings.trajectory_builder or builder.config.finetuning.trajectory_builder


async def _build_parts(builder: ComponentBuilder, stage: PipelineStage, attempt: Attempts) -> StageParts | None:
    name = _name_builder(builder, stage)
    algorithm = await attempt(partial(builder.get_stage_algorithm, stage))
    own = None if name is None else await attempt(partial(builder.get_trajectory_builder, name, stage.name))
    return None if own is None or algorithm is None else StageParts(stage, algorithm, own)


async def _find_data(
    builder: ComponentBuilder,
    stage: PipelineStage,
    splits: Splits | None,
    row_locations: Mapping[str, str],
    attempt: Attempts,
) -> StageData:
    """Returns the training examples of a stage, and adds those of its own dataset to the splits; none: unknown."""
    if stage.settings.dataset is None:
        return StageData([] if splits is None else splits["train"], dict(row_locations))
    data: StageData | None = await attempt(partial(_load_examples, builder, stage, splits or {}))
    if data is not None and splits is not None:
        splits[name_train_split(stage)] = data.items
    return data or StageData([])


def _move(problem: Problem, stage: PipelineStage) -> Problem:
    if problem.path.startswith(ALGORITHM) and stage.settings.algorithm is not None:
        return replace(problem, path=f"{stage.path}.algorithm{problem.path.removeprefix(ALGORITHM)}")
    if problem.path.startswith(DATASET) and stage.settings.dataset is not None:
        return replace(problem, path=f"{stage.path}.dataset")
    return replace(problem, message=f"in stage {stage.name}: {problem.message}")


async def _load_examples(builder: ComponentBuilder, stage: PipelineStage, splits: Splits) -> StageData:
    """Returns the examples of a stage's own dataset, without those of held-out prompts and conversations.

    An id that another split has, too, gets the stage's name in front.
    """
    path = f"{stage.path}.dataset"
    try:
        entry = builder.config.trajectory_builders.get(str(_name_builder(builder, stage)))
        has_replies = isinstance(entry, DatasetTrajectoryBuilderConfig)
        dataset = await builder.get_dataset(Path(str(stage.settings.dataset)), has_replies=has_replies)
        loaded = list(dataset.load())
    except ConfigError as error:
        moved = (replace(each, path=path) if not each.location else each for each in error.problems)
        raise ConfigError([builder.locate(each) for each in moved]) from None
    group_key = builder.config.finetuning.splits.group_key
    held_out = HeldOutPrompts([item for split in HELD_OUT for item in splits.get(split, [])], group_key)
    kept = [item for item in loaded if not held_out.match(item)]
    if not kept:
        rows = f"all {len(loaded)} rows of {stage.settings.dataset}"
        message = f"{rows} have the prompt or the {group_key or 'group'} of a held-out example (select, confirm)"
        raise ConfigError(Problem(path, message, "use other rows: the verdict needs examples that no stage trains on"))
    taken = {str(item.id) for items in splits.values() for item in items}
    shared = any(str(item.id) in taken for item in kept)
    prefix = f"{stage.name}:" if shared else ""
    locations = getattr(dataset, "row_locations", {})
    named = {f"{prefix}{id_}": place for id_, place in locations.items()}
    return StageData([item.copy_with_updates(id=f"{prefix}{item.id}") for item in kept], named)


def check_pipeline(builder: ComponentBuilder, adapter: TrainerAdapter | None) -> list[Problem]:
    config = builder.config
    problems = []
    trainer = config.trainers.get(str(config.finetuning.trainer))
    if trainer is not None and trainer.static_type not in ("epoch", None):
        message = f"a pipeline needs the trainer `_type: epoch`, but this one is {trainer.static_type}"
        problems.append(Problem("finetuning.pipeline", message, "use `_type: epoch`, or one run per stage"))
    if adapter is not None and not adapter.trains_stages:
        message = f"{type(adapter).__name__} trains with one algorithm and one set of settings, not with stages"
        problems.append(Problem("finetuning.pipeline", message, "use `_type: local`, or one run per stage"))
    return problems


def describe_stages(builder: TrajectoryBuilder, splits: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    assert isinstance(builder, StagedTrajectoryBuilder)  # `build_stages` made it
    return [(f"stage {each.stage.name}", _describe_stage(each, splits)) for each in builder.parts]


def _describe_stage(parts: StageParts, splits: Mapping[str, Sequence[Any]]) -> str:
    algorithm, settings = parts.algorithm, parts.builder.trajectory_builder_config
    chosen = getattr(algorithm, "config", None)
    shown = [
        describe_epochs(parts.stage),
        f"{type(algorithm).__name__}: {_format(chosen)}" if chosen is not None else type(algorithm).__name__,
        f"{settings.static_type or type(parts.builder).__name__}: {_format(settings)}",
    ]
    if parts.stage.settings.dataset is not None:
        count = len(splits.get(name_train_split(parts.stage), ()))
        shown.append(f"{count} rows of {parts.stage.settings.dataset}")
    if (sampling := parts.stage.settings.sampling) is not None:
        shown.append(f"sampling: {_format(sampling)}")
    return "; ".join(shown)


def _format(settings: Any) -> str:
    """Returns the settings that differ from their defaults, as `name value, name value`; `defaults` if none does."""
    fields = type(settings).model_fields
    values = {name: getattr(settings, name) for name in fields if name != "reward"}
    changed = {
        name: value
        for name, value in values.items()
        if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
    }
    return ", ".join(f"{name} {v if isinstance(v, str) else to_json(v)}" for name, v in changed.items()) or "defaults"
