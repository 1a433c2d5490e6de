"""Everything that can be refused is refused here, at once and before any work starts."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig, FinetuneRunConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.splits import split_examples
from reinforge.evaluation.validation_set import split_with_validation
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, Evaluator, Needs, Trainer, TrainerAdapter, TrajectoryBuilder
from reinforge.rollout.capture import ChatModel
from reinforge.rollout.llms import PolicyLLM, adapters_of
from reinforge.rollout.workflow import BoundWorkflow
from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilder
from reinforge.trainer.builders.group import GroupTrajectoryBuilder
from reinforge.trainer.setup.components import BUNDLED, Builder
from reinforge.trainer.setup.run_settings import refuse_run_settings
from reinforge.types.evaluation import EvalInputItem

VALIDATION_FILE = "finetuning.run_configuration.validation_config_file"


@dataclass
class Parts:
    """The components of one run.

    Attributes:
        splits: Examples by split: `train`, `select`, `confirm`.
        llms: Models by entry of `llms`.
        evaluators: By name.
        held_out_evaluators: By name, for `select` and `confirm`; the same unless another file has its own.
        shape: What the dataset's rows looked like; None where the loader does not tell.
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

    @property
    def reward_metric(self) -> str:
        """The evaluator that is the reward."""
        assert self.config.reward_function is not None  # FinetuneConfig refuses to be enabled without
        return self.config.reward_function.name

    @property
    def gate_metric(self) -> str:
        """The evaluator that decides."""
        return self.config.gate.metric or self.reward_metric


class Attempts:
    """Tries one thing after the other and gathers what is wrong with each.

    Args:
        placed: Gives a problem its place in the file.
    """

    def __init__(self, placed: Callable[[Problem], Problem]) -> None:
        self.placed, self.problems = placed, list[Problem]()

    async def __call__(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what `make` makes, or None after a `ConfigError`."""
        try:
            return await make()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def add(self, problems: Iterable[Problem]) -> None:
        """Gathers problems that were found in another way."""
        self.problems += map(self.placed, problems)

    def raise_if_any(self) -> None:
        """Raises every problem gathered so far as one `ConfigError`."""
        if self.problems:
            raise ConfigError(self.problems)


def refuse_disabled(loaded: LoadedConfig) -> None:
    """Stops where nothing was asked for.

    Raises:
        ConfigError: `finetuning.enabled` is false.
    """
    if not loaded.config.finetuning.enabled:
        where = loaded.locate("finetuning.enabled")
        raise ConfigError(
            Problem("finetuning.enabled", "is false, so there is nothing to run", "set it to true", where)
        )


async def make_parts(builder: Builder, folder: Path | None) -> Parts:
    """Returns every component of a run.

    Args:
        builder: Makes them.
        folder: The run folder, which must not exist yet; None: no run will follow.

    Raises:
        ConfigError: Everything that is wrong.
    """
    attempt = Attempts(builder.placed)
    parts = await gather_parts(builder, folder, attempt)
    attempt.raise_if_any()
    return parts


async def gather_parts(builder: Builder, folder: Path | None, attempt: Attempts) -> Parts:
    """Returns the components that can be made, None in place of the others; `attempt` has what is wrong with those."""
    config = builder.config.finetuning
    if config.run_configuration is None:
        config.run_configuration = FinetuneRunConfig()
    attempt.add(refuse_run_settings(config.run_configuration))
    if folder is not None and folder.exists():
        fix = "give another --run_name, or remove the folder to start again"
        attempt.add([Problem("", f"run folder {folder} exists already", fix)])
    workflow = await attempt(builder.get_workflow)
    validation = await attempt(builder.get_validation_builder)
    splits: Any = await attempt(lambda: _load_splits(builder, validation)) if validation else None
    if workflow is not None and splits:
        attempt.add(workflow.example_problems([item for items in splits.values() for item in items]))
    evaluators = {}
    for name in builder.config.eval.evaluators:
        evaluators[name] = await attempt(partial(builder.get_evaluator, name))
    held_out: Any = await attempt(lambda: _held_out_evaluators(builder, validation, evaluators)) if validation else None
    algorithm = await attempt(builder.get_algorithm)
    trajectory_builder = await attempt(lambda: builder.get_trajectory_builder(str(config.trajectory_builder)))
    if isinstance(trajectory_builder, GroupTrajectoryBuilder) and algorithm is not None:
        attempt.add(_does_not_fit(builder, trajectory_builder, algorithm))
    attempt.add(_several_adapters(builder, trajectory_builder))
    trainer = await attempt(lambda: builder.get_trainer(str(config.trainer)))
    if builder.makes_models and (config.policy.model or "").startswith(BUNDLED):
        attempt.raise_if_any()  # a bundled model makes itself, which takes time: not for a run that cannot start
    adapter = await attempt(lambda: builder.get_trainer_adapter(str(config.trainer_adapter)))
    if adapter is not None:
        attempt.add(adapter.preflight(config))
        if adapter.serves_policy:
            attempt.add(_called_by_nobody(builder, trajectory_builder))
    llms = {}
    for name in builder.config.llms:
        llms[name] = await attempt(partial(builder.get_llm, name))
    dataset = await builder.get_dataset(config.run_configuration.dataset) if splits is not None else None
    if isinstance(trajectory_builder, DatasetTrajectoryBuilder) and splits and algorithm is not None:
        attempt.add(trajectory_builder.problems(splits["train"], getattr(dataset, "places", {}), algorithm))
    shape = getattr(dataset, "shape", None)
    return Parts(
        config, workflow, splits, llms, evaluators, held_out, algorithm, adapter, trajectory_builder, trainer, shape
    )


async def _load_splits(builder: Builder, other: Builder) -> dict[str, list[EvalInputItem]]:
    config = builder.config.finetuning
    run = config.run_configuration
    items = (await builder.get_dataset(run.dataset)).load()
    id_key = getattr(builder.config.eval.general.dataset, "id_key", "id")
    if run.validation_dataset is None and run.validation_config_file is None:
        return split_examples(items, config.splits, config.seed, id_key=id_key)
    if run.validation_dataset is None and other.config.eval.general.dataset is None:
        message = f"{run.validation_config_file} has no eval.general.dataset to select and confirm on"
        raise ConfigError(Problem(VALIDATION_FILE, message, "add one there, or give --validation_dataset"))
    validation = (await other.get_dataset(run.validation_dataset)).load()
    return split_with_validation(items, validation, config.splits, config.seed, id_key=id_key)


async def _held_out_evaluators(
    builder: Builder, other: Builder, evaluators: dict[str, Evaluator]
) -> dict[str, Evaluator]:
    """Returns the evaluators of `select` and `confirm`; another file that has none leaves it to this one's."""
    names = other.config.eval.evaluators
    if other is builder or not names:
        return evaluators
    config = builder.config.finetuning
    for name in (config.reward_function.name, config.gate.metric):
        if name is not None and name not in names:
            message = f'the run is judged by the evaluator "{name}", and that file has only {", ".join(names)}'
            raise ConfigError(other.placed(Problem("eval.evaluators", message, f"add {name} there, or leave all out")))
    return {name: await other.get_evaluator(name) for name in names}


def _does_not_fit(builder: Builder, trajectory_builder: GroupTrajectoryBuilder, algorithm: Algorithm) -> list[Problem]:
    """Returns why what is collected is nothing for this algorithm, or for the curriculum."""
    config = builder.config.finetuning
    path = f"trajectory_builders.{config.trajectory_builder}"
    found = trajectory_builder.problems(algorithm, builder.config.workflow)
    problems = [builder.placed(problem, path) for problem in found]
    if config.curriculum_learning.collect_only_included and not trajectory_builder.groups_are_examples:
        message = "an example makes several groups here: one may be included, another not"
        problems.append(Problem("finetuning.curriculum_learning.collect_only_included", message, "set it to false"))
    return problems


def _several_adapters(builder: Builder, trajectory_builder: Any) -> list[Problem]:
    """Returns what cannot be done for several adapters."""
    names = list(dict.fromkeys(adapters_of(builder.config.llms).values()))
    if len(names) < 2:
        return []
    problems, config = [], builder.config.finetuning
    if isinstance(trajectory_builder, DatasetTrajectoryBuilder):
        message = f"the rows of a dataset do not say which adapter is to learn them: {', '.join(names)}"
        path, fix = f"trajectory_builders.{config.trajectory_builder}", "train one adapter on them, in a run of its own"
        problems.append(Problem(path, message, fix))
    if config.curriculum_learning.collect_only_included:
        message = f"an example makes a group for each adapter ({', '.join(names)}): one may be included, another not"
        problems.append(Problem("finetuning.curriculum_learning.collect_only_included", message, "set it to false"))
    return problems


def _called_by_nobody(builder: Builder, trajectory_builder: Any) -> list[Problem]:
    """Returns the problem of a model that is trained while every call of the agent goes elsewhere."""
    names = [f"{name} is {llm.static_type}" for name, llm in builder.config.llms.items()]
    is_called = any(llm.static_type == "policy" for llm in builder.config.llms.values())
    if is_called or not isinstance(trajectory_builder, GroupTrajectoryBuilder | DatasetTrajectoryBuilder):
        return []
    message = f"no entry is `_type: policy`, so the agent never calls the model that is trained ({', '.join(names)})"
    return [Problem("llms", message, "make the entry that the agent calls `_type: policy`")]


def effective_settings(parts: Parts) -> list[tuple[str, str]]:
    """Returns what took effect, for a person: name and value, in the order of the loop."""
    config = parts.config
    settings = getattr(parts.trajectory_builder, "trajectory_builder_config", None)
    of_backend = parts.adapter.effective_settings(config)
    remote = [f"{name}: {llm.endpoint}" for name, llm in parts.llms.items() if hasattr(llm, "endpoint")]
    adapters: dict[str, list[str]] = {}
    for name, llm in parts.llms.items():
        if isinstance(llm, PolicyLLM) and llm.adapter is not None:
            adapters.setdefault(llm.adapter, []).append(name)
    file = config.run_configuration.validation_config_file if config.run_configuration else None
    validated = f"by {', '.join(parts.held_out_evaluators)} on the examples of {file}" if file else None
    algorithm = getattr(parts.algorithm, "config", None)
    chosen = algorithm.model_dump(exclude={"reward"}) if algorithm is not None else {}
    return [
        ("agent", getattr(parts.workflow.function, "__qualname__", type(parts.workflow.function).__name__)),
        ("examples", ", ".join(f"{len(items)} {name}" for name, items in parts.splits.items())),
        *([("dataset", f"rows of the shape {parts.shape}")] if parts.shape else []),
        *([("sends to", ", ".join(remote))] if remote else []),
        *([("adapters", "; ".join(f"{n}: {', '.join(e)}" for n, e in adapters.items()))] if adapters else []),
        *([("validate", validated)] if validated else []),
        ("reward", f"{parts.reward_metric}; the verdict is on {parts.gate_metric}"),
        (
            "collect",
            _told(settings.model_dump(exclude={"reward"})) if settings else "",
        ),
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in config.sampling.model_dump().items())),
        ("algorithm", f"{type(parts.algorithm).__name__}: {_told(chosen)}"),
        *(_on_this_machine(parts) if of_backend is None else of_backend),
    ]


def _on_this_machine(parts: Parts) -> list[tuple[str, str]]:
    """Returns what took effect of the settings of weights that are trained here."""
    config = parts.config
    optimizer, batch = config.policy.optimizer, config.policy.batch
    steps = f"{batch.steps_per_job} steps a job" if batch.steps_per_job else f"{batch.batch_size} samples a step"
    return [
        *([("critic", _critic(config))] if getattr(parts.algorithm, "needs", Needs()).values else []),
        ("optimizer", f"{optimizer.name}, lr {optimizer.learning_rate:g} {config.policy.schedule.name}, {steps}"),
        *([("memory", memory)] if (memory := _memory(config)) else []),
        ("device", f"{config.device} on {platform.machine()}, {platform.system()}, seed {config.seed}"),
    ]


def _memory(config: FinetuneConfig) -> str:
    """Returns what is done about memory, where anything is."""
    told = {
        "bfloat16, the optimizer moves float32 copies": config.policy.precision == "bfloat16",
        "layers are computed again in the backward pass": config.policy.activation_checkpointing,
    }
    return "; ".join(text for text, holds in told.items() if holds)


def _critic(config: FinetuneConfig) -> str:
    critic = config.policy.critic
    trains = "its loss trains the policy's layers too" if critic.shares_trunk else "on the policy's layers as they are"
    return f"a linear value head, lr {critic.learning_rate:g}; {trains}"


def _told(settings: dict[str, Any]) -> str:
    """Returns settings in the words of a YAML file."""
    return ", ".join(
        f"{name} {value if isinstance(value, str) else to_json(value)}" for name, value in settings.items()
    )
