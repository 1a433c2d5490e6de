"""Validates a run and builds its components, before any work starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import find_optional_answers, leave_out_answers
from reinforge.config.schema import Config, FinetuneRunConfig
from reinforge.engine import import_engine
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.splits import FIXED, split_examples, split_with_validation, take_transfer
from reinforge.interfaces import Algorithm, DatasetLoader, Evaluator, TrajectoryBuilder
from reinforge.port_bases import SavesWeights
from reinforge.registry import load_named
from reinforge.rollout.runner import choose_llm
from reinforge.runs.run_folder import read_config
from reinforge.trainer.epoch_collection import check_overlap
from reinforge.trainer.gate import refuse_no_verdict
from reinforge.trainer.guards import refuse_repetitions
from reinforge.trainer.setup.compatibility import (
    can_serve_policy,
    find_comparison_problems,
    find_level_problems,
    refuse_policy_llm,
    refuse_sampling,
    require_policy_llm,
)
from reinforge.trainer.setup.components import BUNDLED, Attempts, ComponentBuilder
from reinforge.trainer.setup.disk_space import find_disk_problems, measure_disk
from reinforge.trainer.setup.parts import Parts
from reinforge.trainer.setup.run_settings import validate_run_settings
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow

if TYPE_CHECKING:
    from reinforge.engine.model.dtype import DtypeChoice


VALIDATION_FILE = "finetuning.run_configuration.validation_config_file"


def require_enabled(loaded: LoadedConfig) -> None:
    if not loaded.config.finetuning.enabled:
        where = loaded.locate("finetuning.enabled")
        raise ConfigError(
            Problem("finetuning.enabled", "is false, so there is nothing to run", "set it to true", where)
        )


async def build_parts(builder: ComponentBuilder, folder: Path | None) -> Parts:
    attempt = Attempts(builder.locate)
    parts = await try_build_parts(builder, folder, attempt)
    if folder is not None:
        attempt.add(find_disk_problems(builder.loaded, measure_disk(builder.loaded)))
    attempt.raise_if_any()
    return parts


def refuse_absent_model(config: Config) -> None:
    """Raises `BackendUnavailable` for a hub id that neither the cache nor the hub has, before there is a run folder."""
    policy, adapter = config.finetuning.policy, config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    if adapter is None or adapter.static_type != "local" or policy.model is None:
        return
    from reinforge.engine.model.hub import is_hub_unreachable
    from reinforge.engine.model.preflight import looks_like_hub_id

    if looks_like_hub_id(policy.model):
        is_hub_unreachable(policy.model, policy.revision)


async def try_build_parts(builder: ComponentBuilder, folder: Path | None, attempt: Attempts) -> Parts:
    """Returns the components, with None for those that cannot be built; `attempt` then holds the problems.

    Components with invalid settings, and what looks at them, are left out: the configuration's own problems name them.
    """
    config = builder.config.finetuning
    run = config.run_configuration or FinetuneRunConfig()
    attempt.add(validate_run_settings(run, builder.config.workflow))
    if folder is not None and folder.exists():
        attempt.add([Problem("", f"the run folder {folder} already exists", _suggest_ways_on(builder, folder))])
    workflow = await attempt(builder.get_workflow)
    validation = await attempt(builder.get_validation_builder)
    if validation is not None and validation is not builder:
        attempt.add(validation.loaded.problems)
    splits: Any = await attempt(lambda: _load_splits(builder, validation, attempt)) if validation else None
    expected = [item.expected_output_obj for item in splits["train"]] if splits else []
    if splits and all(each is None for each in expected) and find_optional_answers(builder.config):
        leave_out_answers(config)
    if workflow is not None and splits:
        attempt.add(workflow.example_problems([item for items in splits.values() for item in items]))
    evaluators = {}
    for name in builder.config.eval.evaluators:
        evaluators[name] = await attempt(partial(builder.get_evaluator, name))
    held_out: Any = None
    if validation is not None:
        held_out = await attempt(lambda: _held_out_evaluators(builder, validation, evaluators, attempt))
    algorithm = await attempt(builder.get_algorithm)
    dataset = await builder.get_dataset(run.dataset) if splits is not None else None
    trajectory_builder: Any = await _get_trajectory_builder(builder, algorithm, splits, dataset, attempt)
    if splits:  # by now with the examples of each stage
        attempt.add(refuse_repetitions(splits, config.splits))
        attempt.add(find_level_problems(config, splits))
    if splits and config.gate.regression is not None:
        from reinforge.trainer.setup.further_sets import load_regression  # for a run with a regression set alone

        splits = await attempt(partial(load_regression, builder, workflow, splits))
    is_known = _knows_agent(builder.config)
    trainer = await _get_named(attempt, builder.get_trainer, config.trainer)
    if builder.makes_models and (config.policy.model or "").startswith(BUNDLED):
        attempt.raise_if_any()  # making a bundled model takes time: first be sure that the run can start
    adapter = await _get_named(attempt, builder.get_trainer_adapter, config.trainer_adapter)
    if config.pipeline:
        from reinforge.trainer.setup.pipeline import check_pipeline  # for a pipeline alone

        attempt.add(check_pipeline(builder, adapter))
    attempt.add(check_overlap(config, trainer, adapter, trajectory_builder))
    if adapter is not None:
        attempt.add(adapter.validate(config))
        needs_llm = trajectory_builder is not None and trajectory_builder.requires_policy_llm
        if adapter.serves_policy and needs_llm and is_known:
            attempt.add(require_policy_llm(builder.config))
        if not can_serve_policy(adapter):
            attempt.add(refuse_policy_llm(builder.config, adapter))
            attempt.add(refuse_sampling(config))
    compared = find_comparison_problems(builder.config, evaluators, held_out or {}, splits or {}, trajectory_builder)
    reported = {problem.path for problem in attempt.problems}
    attempt.add([problem for problem in compared if problem.path not in reported])
    llms = await build_llms(builder, workflow, attempt)
    shape = getattr(dataset, "shape", None)
    trackers = {name: await attempt(partial(builder.get_tracker, name)) for name in config.trackers}
    parts = Parts(
        config,
        workflow,
        splits,
        llms,
        evaluators,
        held_out,
        algorithm,
        adapter,
        trajectory_builder,
        trainer,
        shape,
        trackers,
    )
    if splits and isinstance(adapter, SavesWeights):  # without saved weights no run compares two models
        attempt.add(refuse_no_verdict(config, splits, parts.clusters))
    if splits and config.gate.reference is not None:
        from reinforge.evaluation.reference import find_reference_problems  # for a run with a reference alone

        attempt.add(find_reference_problems(config.gate, splits["confirm"]))
    return parts


async def _get_trajectory_builder(
    builder: ComponentBuilder,
    algorithm: Algorithm | None,
    splits: dict[str, list[EvalInputItem]] | None,
    dataset: DatasetLoader | None,
    attempt: Attempts,
) -> TrajectoryBuilder | None:
    """Returns the validated trajectory builder, or that of the stages of a pipeline; None: it cannot be built."""
    name, row_locations = builder.config.finetuning.trajectory_builder, getattr(dataset, "row_locations", {})
    if builder.config.finetuning.pipeline:
        from reinforge.trainer.setup.pipeline import build_stages  # for a pipeline alone

        return await build_stages(builder, splits, row_locations, attempt, is_known=_knows_agent(builder.config))
    made: TrajectoryBuilder | None = await _get_named(attempt, builder.get_trajectory_builder, name)
    if made is not None and algorithm is not None and _knows_agent(builder.config):
        found = made.validate(builder.config, algorithm, splits["train"] if splits else [], row_locations)
        attempt.add(builder.locate(problem, f"trajectory_builders.{name}") for problem in found)
    return made


def _knows_agent(config: Config) -> bool:
    parts = [config.workflow, *config.llms.values()]
    return all(part is not None and part.static_type is not None for part in parts)


async def _get_named(attempt: Attempts, get: Callable[[str], Awaitable[Any]], name: str | None) -> Any:
    """Returns the component that the configuration names; None: it names none, and its problems say so."""
    return None if name is None else await attempt(partial(get, name))


def _suggest_ways_on(builder: ComponentBuilder, folder: Path) -> str:
    """Returns what to do about a run folder that exists, in the words of the command line or of Python."""
    if builder.loaded.path is not None:
        return "resume it with --resume, choose another --run_name, or remove it with `reinforge runs rm`"
    return f"pass overwrite=True to replace it, resume={str(folder)!r} to resume it, or another run_name"


async def build_llms(builder: ComponentBuilder, workflow: BoundWorkflow | None, attempt: Attempts) -> dict[str, Any]:
    """Returns the models by entry of `llms`; `attempt` then holds their problems, and a workflow that cannot choose."""
    llms = {name: await attempt(partial(builder.get_llm, name)) for name in builder.config.llms}
    if workflow is not None and None not in llms.values():
        try:
            choose_llm(workflow, llms, {name for name, each in builder.config.llms.items() if not each.train})
        except ConfigError as error:
            attempt.add(error.problems)
    return llms


async def _load_splits(
    builder: ComponentBuilder, other: ComponentBuilder, attempt: Attempts
) -> dict[str, list[EvalInputItem]] | None:
    """Returns the examples of each split; None: a dataset cannot be loaded, and `attempt` holds the problems."""
    config = builder.config.finetuning
    run = config.run_configuration or FinetuneRunConfig()

    async def load(source: ComponentBuilder, file: str | Path | None) -> list[EvalInputItem]:
        dataset = await source.get_dataset(file)
        try:
            return list(dataset.load())
        except ConfigError as error:
            raise ConfigError(map(source.locate, error.problems)) from None

    items = await attempt(lambda: load(builder, run.dataset))
    items, transfer = take_transfer(items) if items is not None else (None, [])
    more = {"transfer": transfer} if transfer else {}
    id_key = getattr(builder.config.eval.general.dataset, "id_key", "id")
    if run.validation_dataset is None and run.validation_config_file is None:
        split = load_named(FIXED) if config.splits.fixed else split_examples
        return None if items is None else {**split(items, config.splits, config.seed, id_key=id_key), **more}
    if run.validation_dataset is None and other.config.eval.general.dataset is None:
        message = f"{run.validation_config_file} has no eval.general.dataset to validate on"
        raise ConfigError(Problem(VALIDATION_FILE, message, "add one there, or pass --validation_dataset"))
    validation = await attempt(lambda: load(other, run.validation_dataset))
    if items is None or validation is None:
        return None
    return {**split_with_validation(items, validation, config.splits, config.seed, id_key=id_key), **more}


async def _held_out_evaluators(
    builder: ComponentBuilder, other: ComponentBuilder, evaluators: dict[str, Evaluator], attempt: Attempts
) -> dict[str, Evaluator]:
    """Returns the evaluators of `select` and `confirm`: the validation file's if it has any."""
    names = other.config.eval.evaluators
    if other is builder or not names:
        return evaluators
    config = builder.config.finetuning
    reward = config.reward_function.name if config.reward_function is not None else None
    for name in (reward, config.gate.metric):
        if name is not None and name not in names:
            message = f'the run needs the evaluator "{name}", but this file has only {", ".join(names)}'
            raise ConfigError(
                other.locate(
                    Problem("eval.evaluators", message, f"add {name}, or remove all of them to use those of the run")
                )
            )
    return {name: await attempt(partial(other.get_evaluator, name)) for name in names}


def settle_dtype(loaded: LoadedConfig, resumed: Path | None) -> DtypeChoice | None:
    """Replaces `auto` by the type that the run computes in; returns the choice, or None if there was nothing to choose.

    `config.yml` of the run folder then names the type, so that whatever reads it loads the same one.
    """
    config = loaded.config.finetuning
    if config.policy.dtype != "auto":
        return None
    import_engine()  # says what to install if torch is missing
    from reinforge.engine.model.dtype import DtypeChoice, choose_dtype

    if resumed is not None and (known := _read_dtype(resumed)) is not None:
        choice = DtypeChoice(known, "as when the run started")
    else:
        choice = choose_dtype(config.policy, config.device, deterministic=config.deterministic)
    config.policy = config.policy.model_copy(update={"dtype": choice.dtype})
    return choice


def _read_dtype(folder: Path) -> str | None:
    """Returns the type that a run folder's configuration names; None: it stopped during startup."""
    known = ((read_config(folder).get("finetuning") or {}).get("policy") or {}).get("dtype")
    return known if known in ("float32", "bfloat16") else None
