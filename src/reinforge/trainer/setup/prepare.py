"""Validates a run and builds its components, before any work starts."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.algorithms.staged import StagedAlgorithm
from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.pipeline import list_stages
from reinforge.config.schema import Config, FinetuneConfig, FinetuneRunConfig, PolicyConfig, SamplingConfig
from reinforge.engine.learning_rate import describe_learning_rate
from reinforge.engine.model.source import describe_source
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.splits import find_clusters, split_examples
from reinforge.evaluation.validation_set import split_with_validation
from reinforge.files import to_json
from reinforge.interfaces import (
    Algorithm,
    ChatModel,
    DatasetLoader,
    Evaluator,
    Tracker,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from reinforge.rollout.models.llms import PolicyLLM, find_served_entries
from reinforge.rollout.runner import choose_llm
from reinforge.trainer.builders.staged import StagedTrajectoryBuilder
from reinforge.trainer.gate import describe_power
from reinforge.trainer.guards.precautions import refuse_repetitions
from reinforge.trainer.overlap import check_overlap
from reinforge.trainer.setup.attempts import Attempts
from reinforge.trainer.setup.comparisons import describe_comparisons, find_comparison_problems
from reinforge.trainer.setup.components import BUNDLED, ComponentBuilder
from reinforge.trainer.setup.run_settings import validate_run_settings
from reinforge.trainer.setup.stages import build_stages, check_pipeline, describe_stages
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.sample import Needs
from reinforge.types.workflow import BoundWorkflow

VALIDATION_FILE = "finetuning.run_configuration.validation_config_file"


@dataclass
class Parts:
    """The components of one run.

    Attributes:
        splits: Examples by split: `train`, `select`, `confirm`.
        llms: Models by entry of `llms`.
        evaluators: By name.
        held_out_evaluators: By name, for `select` and `confirm`; the same unless the validation file has its own.
        shape: Detected shape of the dataset's rows; None if the loader does not report it.
        trackers: By name.
    """

    config: FinetuneConfig
    workflow: BoundWorkflow
    splits: dict[str, list[EvalInputItem]]
    llms: dict[str, ChatModel]
    evaluators: dict[str, Evaluator]
    held_out_evaluators: dict[str, Evaluator]
    algorithm: Algorithm
    adapter: TrainerAdapter
    trajectory_builder: TrajectoryBuilder
    trainer: Trainer
    shape: str | None = None
    trackers: dict[str, Tracker] = field(default_factory=dict)

    @property
    def reward_metric(self) -> str:
        """The evaluator that is the reward."""
        assert self.config.reward_function is not None  # FinetuneConfig requires it
        return self.config.reward_function.name

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each part of the evaluator of the verdict, or else of the reward; empty: neither is `weighted`."""
        for metric in (self.gate_metric, self.reward_metric):
            evaluator = self.held_out_evaluators[metric]
            if isinstance(evaluator, Weighted):
                return dict(evaluator.weights)
        return {}

    @property
    def gate_metric(self) -> str:
        """The evaluator of the verdict."""
        return self.config.gate.metric or self.reward_metric


def require_enabled(loaded: LoadedConfig) -> None:
    """Refuses a configuration with `finetuning.enabled: false`.

    Raises:
        ConfigError: `finetuning.enabled` is false.
    """
    if not loaded.config.finetuning.enabled:
        where = loaded.locate("finetuning.enabled")
        raise ConfigError(
            Problem("finetuning.enabled", "is false, so there is nothing to run", "set it to true", where)
        )


async def build_parts(builder: ComponentBuilder, folder: Path | None) -> Parts:
    """Returns every component of a valid run.

    Args:
        builder: Builds them.
        folder: The new run folder, which must not exist yet; None: not needed.

    Raises:
        ConfigError: Lists every problem.
    """
    attempt = Attempts(builder.locate)
    parts = await try_build_parts(builder, folder, attempt)
    attempt.raise_if_any()
    return parts


async def try_build_parts(builder: ComponentBuilder, folder: Path | None, attempt: Attempts) -> Parts:
    """Returns the components, with None for those that cannot be built; `attempt` then holds the problems.

    Components with invalid settings, and what looks at them, are left out: the configuration's own problems name them.
    """
    config = builder.config.finetuning
    if config.run_configuration is None:
        config.run_configuration = FinetuneRunConfig()
    attempt.add(validate_run_settings(config.run_configuration, builder.config.workflow))
    if folder is not None and folder.exists():
        attempt.add([Problem("", f"the run folder {folder} already exists", _suggest_ways_on(builder, folder))])
    workflow = await attempt(builder.get_workflow)
    validation = await attempt(builder.get_validation_builder)
    if validation is not None and validation is not builder:
        attempt.add(validation.loaded.problems)
    splits: Any = await attempt(lambda: _load_splits(builder, validation, attempt)) if validation else None
    if workflow is not None and splits:
        attempt.add(workflow.example_problems([item for items in splits.values() for item in items]))
    evaluators = {}
    for name in builder.config.eval.evaluators:
        evaluators[name] = await attempt(partial(builder.get_evaluator, name))
    held_out: Any = None
    if validation is not None:
        held_out = await attempt(lambda: _held_out_evaluators(builder, validation, evaluators, attempt))
    algorithm = await attempt(builder.get_algorithm)
    dataset = await builder.get_dataset(config.run_configuration.dataset) if splits is not None else None
    trajectory_builder: Any = await _get_trajectory_builder(builder, algorithm, splits, dataset, attempt)
    if splits:  # by now with the examples of each stage
        attempt.add(refuse_repetitions(splits, config.splits))
    is_known = _knows_agent(builder.config)
    trainer = await _get_named(attempt, builder.get_trainer, config.trainer)
    if builder.makes_models and (config.policy.model or "").startswith(BUNDLED):
        attempt.raise_if_any()  # making a bundled model takes time: first be sure that the run can start
    adapter = await _get_named(attempt, builder.get_trainer_adapter, config.trainer_adapter)
    if config.pipeline:
        attempt.add(check_pipeline(builder, adapter))
    attempt.add(check_overlap(config, trainer, adapter, trajectory_builder))
    if adapter is not None:
        attempt.add(adapter.validate(config))
        needs_llm = trajectory_builder is not None and trajectory_builder.requires_policy_llm
        if adapter.serves_policy and needs_llm and is_known:
            attempt.add(require_policy_llm(builder.config))
        if not can_serve_policy(adapter):
            attempt.add(_refuse_policy_llm(builder.config, adapter))
            attempt.add(_refuse_sampling(config))
    compared = find_comparison_problems(builder.config, evaluators, held_out or {}, splits or {}, trajectory_builder)
    reported = {problem.path for problem in attempt.problems}
    attempt.add([problem for problem in compared if problem.path not in reported])
    llms = await build_llms(builder, workflow, attempt)
    shape = getattr(dataset, "shape", None)
    trackers = {name: await attempt(partial(builder.get_tracker, name)) for name in config.trackers}
    return Parts(
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
        return await build_stages(builder, splits, row_locations, attempt, is_known=_knows_agent(builder.config))
    made: TrajectoryBuilder | None = await _get_named(attempt, builder.get_trajectory_builder, name)
    if made is not None and algorithm is not None and _knows_agent(builder.config):
        found = made.validate(builder.config, algorithm, splits["train"] if splits else [], row_locations)
        attempt.add(builder.locate(problem, f"trajectory_builders.{name}") for problem in found)
    return made


def _knows_agent(config: Config) -> bool:
    """Returns True if the settings of the agent and of each model are known, at least in part."""
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
            choose_llm(workflow, llms)
        except ConfigError as error:
            attempt.add(error.problems)
    return llms


async def _load_splits(
    builder: ComponentBuilder, other: ComponentBuilder, attempt: Attempts
) -> dict[str, list[EvalInputItem]] | None:
    """Returns the examples of each split; None: a dataset cannot be loaded, and `attempt` holds the problems."""
    config = builder.config.finetuning
    run = config.run_configuration

    async def load(source: ComponentBuilder, file: str | Path | None) -> list[EvalInputItem]:
        dataset = await source.get_dataset(file)
        try:
            return list(dataset.load())
        except ConfigError as error:
            raise ConfigError(map(source.locate, error.problems)) from None

    items = await attempt(lambda: load(builder, run.dataset))
    id_key = getattr(builder.config.eval.general.dataset, "id_key", "id")
    if run.validation_dataset is None and run.validation_config_file is None:
        return None if items is None else split_examples(items, config.splits, config.seed, id_key=id_key)
    if run.validation_dataset is None and other.config.eval.general.dataset is None:
        message = f"{run.validation_config_file} has no eval.general.dataset to validate on"
        raise ConfigError(Problem(VALIDATION_FILE, message, "add one there, or pass --validation_dataset"))
    validation = await attempt(lambda: load(other, run.validation_dataset))
    if items is None or validation is None:
        return None
    return split_with_validation(items, validation, config.splits, config.seed, id_key=id_key)


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


def can_serve_policy(adapter: TrainerAdapter) -> bool:
    """Returns False if the adapter's class leaves `policy()` as it is: it trains a model that something else serves."""
    return type(adapter).policy is not TrainerAdapter.policy


def _refuse_policy_llm(config: Config, adapter: TrainerAdapter) -> list[Problem]:
    """Returns the problem of entries that are `_type: policy` although the adapter serves none."""
    name = type(adapter).__name__
    message = f"the trainer adapter {name} serves no policy, since it has no method policy()"
    fix = "name the model that your backend serves: `_type: openai`, model_name and base_url; or use `_type: local`"
    return [
        Problem(f"llms.{entry}._type", message, f"{fix} under trainer_adapters")
        for entry, llm in config.llms.items()
        if llm.static_type == "policy"
    ]


def _refuse_sampling(config: FinetuneConfig) -> list[Problem]:
    """Returns the problem of sampling settings that no remote model would be given."""
    written, defaults = config.sampling, SamplingConfig()
    changed = [name for name in SamplingConfig.model_fields if getattr(written, name) != getattr(defaults, name)]
    message = "has no effect on a model that the trainer adapter does not serve itself"
    fix = "set it in the agent, or in the entry of llms that it calls"
    return [Problem(f"finetuning.sampling.{name}", message, fix) for name in changed]


def require_policy_llm(config: Config) -> list[Problem]:
    """Returns the problem of a model that is trained although the agent calls only other models."""
    if any(llm.static_type == "policy" for llm in config.llms.values()) or find_served_entries(config):
        return []
    names = ", ".join(f"{name} is {llm.static_type}" for name, llm in config.llms.items())
    message = f"no entry is `_type: policy`, so the agent never calls the model that is trained ({names})"
    adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    served = None if adapter is None else adapter.served_model
    by_name = f", or name the trained model there: model_name: {served}" if served else ""
    return [Problem("llms", message, f"set `_type: policy` for the entry that the agent calls{by_name}")]


def effective_settings(parts: Parts) -> list[tuple[str, str]]:
    """Returns the effective settings to print: name and value, in the order of the loop."""
    config = parts.config
    of_backend = parts.adapter.effective_settings(config)
    remote = [f"{name}: {llm.endpoint}" for name, llm in parts.llms.items() if hasattr(llm, "endpoint")]
    adapters: dict[str, list[str]] = {}
    for name, llm in parts.llms.items():
        if isinstance(llm, PolicyLLM) and llm.adapter is not None:
            adapters.setdefault(llm.adapter, []).append(name)
    file = config.run_configuration.validation_config_file if config.run_configuration else None
    validated = f"with {', '.join(parts.held_out_evaluators)} on the examples of {file}" if file else None
    return [
        ("agent", parts.workflow.source),
        ("examples", ", ".join(f"{len(items)} {name}" for name, items in parts.splits.items())),
        *([("dataset", f"rows of the shape {parts.shape}")] if parts.shape else []),
        *([("sends data to", ", ".join(remote))] if remote else []),
        *([("adapters", "; ".join(f"{n}: {', '.join(e)}" for n, e in adapters.items()))] if adapters else []),
        *([("validate", validated)] if validated else []),
        ("reward", f"{parts.reward_metric}; the verdict uses {parts.gate_metric}"),
        *([("compares", compared)] if (compared := _describe_comparisons(parts)) else []),
        ("verdict", _describe_verdict(parts)),
        *([("trackers", _describe_trackers(config))] if config.trackers else []),
        *(_describe_training(parts)),
        ("sampling", _describe_sampling(parts)),
        *([("overlap", _describe_overlap(config.limits.max_staleness))] if config.limits.max_staleness else []),
        *(_training_settings(parts) if of_backend is None else of_backend),
    ]


def _describe_training(parts: Parts) -> list[tuple[str, str]]:
    """Returns the effective settings of collection and algorithm, or of each stage of a pipeline."""
    if isinstance(parts.trajectory_builder, StagedTrajectoryBuilder):
        return describe_stages(parts.trajectory_builder.parts, parts.splits)
    settings = getattr(parts.trajectory_builder, "trajectory_builder_config", None)
    algorithm = getattr(parts.algorithm, "config", None)
    chosen = algorithm.model_dump(exclude={"reward"}) if algorithm is not None else {}
    return [
        ("collect", _format_settings(settings.model_dump(exclude={"reward"})) if settings else ""),
        ("algorithm", f"{type(parts.algorithm).__name__}: {_format_settings(chosen)}"),
    ]


def _describe_comparisons(parts: Parts) -> str | None:
    return describe_comparisons(parts.evaluators, parts.held_out_evaluators, parts.reward_metric)


def _describe_verdict(parts: Parts) -> str:
    """Returns how small an improvement the verdict can show; a conversation counts once."""
    items, config = parts.splits["confirm"], parts.config
    clusters = find_clusters(items, config.splits.group_key)
    num_clusters = len(items) - len(clusters) + len(set(clusters.values()))
    return describe_power(config.gate, len(items), num_clusters)


def _describe_trackers(config: FinetuneConfig) -> str:
    """Returns `board: tensorboard; team: wandb (https://api.wandb.ai)`."""
    urls = {name: getattr(tracker, "url", "") for name, tracker in config.trackers.items()}
    types = {name: f"{name}: {tracker.static_type}" for name, tracker in config.trackers.items()}
    return "; ".join(f"{text} ({urls[name]})" if urls[name] else text for name, text in types.items())


def _describe_overlap(max_staleness: int) -> str:
    versions = f"{max_staleness} version{'s' * (max_staleness > 1)}"
    return f"later epochs are sampled while a job trains; no trained token is more than {versions} old"


def _describe_sampling(parts: Parts) -> str:
    if not can_serve_policy(parts.adapter):
        return "as the agent and its endpoint say"
    return ", ".join(f"{name} {value:g}" for name, value in parts.config.sampling.model_dump().items())


def _training_settings(parts: Parts) -> list[tuple[str, str]]:
    """Returns the settings of the embedded engine, or which remote model is trained by whom."""
    if can_serve_policy(parts.adapter):
        return _engine_settings(parts)
    entries = {name: parts.llms[name].model_name for name in getattr(parts.trajectory_builder, "policies", ())}
    models = ", ".join(f"{name} ({model})" for name, model in entries.items()) or "the agent's model"
    return [("training", f"{models}, trained by {type(parts.adapter).__name__}")]


def _engine_settings(parts: Parts) -> list[tuple[str, str]]:
    """Returns the effective settings of the embedded engine."""
    config = parts.config
    model = getattr(parts.adapter, "model", None)  # the folder of a bundled model
    policy = config.policy.model_copy(update={"model": model}) if model else config.policy
    stages = list_stages(config)
    optimizers = [
        (f"optimizer {stage.name}", _describe_optimizer(stage.complete_policy(policy), parts.algorithm, stage.first))
        for stage in stages
    ]
    return [
        *([("model", describe_source(policy))] if policy.model is not None else []),
        *([("critic", _describe_critic(config))] if getattr(parts.algorithm, "needs", Needs()).values else []),
        *(optimizers or [("optimizer", _describe_optimizer(policy, parts.algorithm))]),
        *([("dtype", "auto: measured when the run starts")] if config.policy.dtype == "auto" else []),
        *([("memory", memory)] if (memory := _describe_memory(config)) else []),
        ("device", f"{config.device} on {platform.machine()}, {platform.system()}, seed {config.seed}"),
    ]


def _describe_optimizer(policy: PolicyConfig, algorithm: Algorithm, epoch: int = 0) -> str:
    """Returns optimizer, learning rate, schedule and steps of a policy whose algorithm is that of an epoch."""
    batch = policy.batch
    loss = algorithm.get_loss(epoch) if isinstance(algorithm, StagedAlgorithm) else getattr(algorithm, "loss", None)
    steps = f"{batch.steps_per_job} steps per job" if batch.steps_per_job else f"{batch.batch_size} samples per step"
    rate = describe_learning_rate(policy, loss)
    return f"{policy.optimizer.name}, lr {rate}, {policy.schedule.name}, {steps}"


def _describe_memory(config: FinetuneConfig) -> str:
    """Returns the memory savings in effect, if any."""
    savings = {
        "bfloat16 with float32 master weights": config.policy.dtype == "bfloat16",
        "activation checkpointing": config.policy.activation_checkpointing,
    }
    return "; ".join(text for text, holds in savings.items() if holds)


def _describe_critic(config: FinetuneConfig) -> str:
    critic = config.policy.critic
    trained = "and the policy's layers" if critic.shares_trunk else "alone"
    return f"a linear value head, lr {critic.learning_rate:g}; its loss trains the head {trained}"


def _format_settings(settings: dict[str, Any]) -> str:
    """Returns settings as `name value, name value`."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else to_json(value)}" for name, value in settings.items()
    )
