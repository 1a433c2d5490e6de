"""Builds the components of one run and tears them down in reverse order, even when the run fails."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import DEFAULT_ALGORITHM, load_config
from reinforge.config.pipeline import PipelineStage, list_stages
from reinforge.config.schema import Config
from reinforge.errors import ConfigError, Problem, ReinforgeError, describe_error, did_you_mean
from reinforge.interfaces import (
    Algorithm,
    ChatModel,
    DatasetLoader,
    Evaluator,
    PolicyServer,
    Tracker,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from reinforge.registry import REGISTRY, Registry, TypedConfig, load_named
from reinforge.rollout.workflow import bind_workflow
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.trainer.setup.run_settings import use_remote_workflow
from reinforge.types.workflow import BoundWorkflow

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
DRIVER = "driver"  # the placement of an agent that runs in this process
DATASET = "eval.general.dataset"


class ComponentBuilder:
    """Gives access to the components of one configuration; each is built once, on first use.

    Args:
        makes_models: False: a bundled model is looked up but not made, for validation alone.
        progress: Shows how far a bundled model is that is being made.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        registry: Registry | None = None,
        *,
        makes_models: bool = True,
        progress: RunProgress | None = None,
    ):
        self.loaded, self.registry, self.makes_models = loaded, registry or REGISTRY, makes_models
        self.progress = progress or SilentProgress()
        self._made: dict[tuple[str, str, str], Any] = {}
        self._stack = AsyncExitStack()
        self.making_s = 0.0  # of bundled models, which are made on first use and then kept
        self._adapter: TrainerAdapter | None = None
        self._placed: BoundWorkflow | None = None
        self.replaced_adapter: TrainerAdapter | None = None  # serves the policy in place of the configured one
        self._validation: ComponentBuilder | None = None

    @property
    def config(self) -> Any:
        return self.loaded.config

    @property
    def project_root(self) -> Path:
        return self.loaded.project_root

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.__aexit__(*exc_info)

    async def get_validation_builder(self) -> ComponentBuilder:
        """Returns the builder of dataset and evaluators for `select` and `confirm`: itself, or the validation file's.

        The problems of that file are in its `loaded.problems`.
        """
        run = self.config.finetuning.run_configuration
        if run is None or run.validation_config_file is None:
            return self
        if self._validation is None:
            other = load_config(run.validation_config_file, registry=self.registry, keep_going=True)
            made = ComponentBuilder(other, self.registry, makes_models=self.makes_models)
            self._validation = await self._stack.enter_async_context(made)
        return self._validation

    @overload
    async def get_llm(self, name: str) -> ChatModel: ...

    @overload
    async def get_llm(self, name: str, wrapper_type: str) -> Any: ...

    async def get_llm(self, name: str, wrapper_type: str | None = None) -> Any:
        model = await self._section("llm", "llms", name)
        if wrapper_type is None:
            return model
        from reinforge.rollout.functions import build_client  # for agents of the NeMo Agent Toolkit alone

        return build_client(name, wrapper_type)

    def get_max_concurrency(self) -> int:
        return int(self.config.eval.general.max_concurrency)

    async def get_workflow(self) -> BoundWorkflow:
        use_remote_workflow(self.loaded)
        config = self.config.workflow
        made = await self._make("workflow", "workflow", config)
        if not isinstance(made, BoundWorkflow):
            made = bind_workflow(made, getattr(config, "llm", None) or getattr(made, "llm", None))
        if (host := await self.get_environment()) is not None:
            made = load_named("reinforge.environments.session:bind_environment")(made, host)
        return made if getattr(config, "placement", DRIVER) == DRIVER else await self._place(made)

    async def _place(self, workflow: BoundWorkflow) -> BoundWorkflow:
        if self._placed is None:
            from reinforge.trainer.setup.placement import open_placed  # for such an agent alone

            opened = open_placed(self.loaded, self.config.workflow, workflow, is_run=self.makes_models)
            try:
                self._placed = await self._stack.enter_async_context(opened)
            except ConfigError as error:
                raise ConfigError([self.locate(problem, "workflow") for problem in error.problems]) from None
        return self._placed

    async def get_environment(self) -> Any:
        """Returns the processes of the configured `environment`, or None if there is none."""
        config = self.config.environment
        if config is None:
            return None
        self._refuse_invalid("environment")
        if ("environment", "", "") not in self._made:
            name = self.loaded.types["environment",]
            opened = load_named("reinforge.environments.host:open_host")(config, name, self.project_root)
            self._made["environment", "", ""] = await self._stack.enter_async_context(opened)
        return self._made["environment", "", ""]

    async def get_function(self, name: str) -> Any:
        config = self.config.functions.get(name)
        if getattr(config, "placement", DRIVER) != DRIVER:
            path = f"functions.{name}.placement"
            fix = "leave it out here; `workflow.placement` moves the whole agent"
            raise ConfigError(self.locate(Problem(path, "a function runs where the agent runs", fix)))
        from reinforge.rollout.functions import FunctionInfo  # for a run with functions alone

        made = await self._section("workflow", "functions", name)
        if isinstance(made, FunctionInfo):
            made.name = name
        return made

    async def get_dataset(self, file: str | Path | None = None, *, has_replies: bool = False) -> DatasetLoader:
        """Returns the dataset's loader.

        Args:
            file: Replaces the configured file; its ending may select another file type.
            has_replies: Its rows are replies to train on, which need not look like the run's examples: these may come
                from elsewhere than a file, or have question and answer in columns of their own.
        """
        config = self.config.eval.general.dataset
        self._refuse_invalid(DATASET)
        if file is None:
            return await self._make("dataset", DATASET, config)
        ending = Path(file).suffix.lower().removeprefix(".")
        is_file, is_known = "file_path" in type(config).model_fields, ending in self.registry.names("dataset")
        if not is_file and not (has_replies and is_known):
            message = f"the dataset's `_type: {config.static_type}` does not read a file, so {file} cannot replace it"
            raise ConfigError(Problem(DATASET, message, "use a dataset with a file_path, such as `_type: jsonl`"))
        name = self.loaded.types.get(tuple(DATASET.split(".")), str(config.static_type))
        if is_known and (not is_file or ending != config.file_path.suffix.lower().removeprefix(".")):
            name, given = ending, config
            config = self.registry.get("dataset", name).config_type.model_construct()
            shared = [key for key in type(config).model_fields if key in type(given).model_fields]
            config = config.model_copy(update={key: getattr(given, key) for key in shared})
        columns = {"question_key": "question", "answer_key": "answer"} if has_replies else {}
        config = config.model_copy(update={"file_path": Path(file), **columns})
        return await self._make("dataset", DATASET, config, name=name, key=str(file))

    async def get_evaluator(self, name: str) -> Evaluator:
        return await self._make("evaluator", f"eval.evaluators.{name}", self.config.eval.evaluators[name])

    async def get_trajectory_builder(self, name: str, stage: str = "") -> TrajectoryBuilder:
        return await self._section("trajectory_builder", "trajectory_builders", name, stage)

    async def get_trainer_adapter(self, name: str) -> TrainerAdapter:
        """Returns a trainer adapter; `llms.<name>._type: policy` resolves to its policy."""
        self._adapter = await self._section("trainer_adapter", "trainer_adapters", name)
        return self._adapter

    def use_trainer_adapter(self, adapter: TrainerAdapter) -> None:
        """Makes an adapter serve the policy in place of the configured one."""
        self._adapter = self.replaced_adapter = adapter

    async def get_trainer(self, name: str) -> Trainer:
        return await self._section("trainer", "trainers", name)

    async def get_tracker(self, name: str) -> Tracker:
        return await self._make("tracker", f"finetuning.trackers.{name}", self.config.finetuning.trackers[name])

    async def get_algorithm(self) -> Algorithm:
        stages = list_stages(self.config.finetuning)
        if not stages:
            return await self.get_stage_algorithm(None)
        from reinforge.algorithms.staged import StagedAlgorithm  # for a pipeline alone

        return StagedAlgorithm([(stage.first, await self.get_stage_algorithm(stage)) for stage in stages])

    async def get_stage_algorithm(self, stage: PipelineStage | None) -> Algorithm:
        """Returns the algorithm of a stage, or else of `finetuning`; GRPO with its defaults if none is configured."""
        if stage is not None and stage.settings.algorithm is not None:
            return await self._make("algorithm", f"{stage.path}.algorithm", stage.settings.algorithm)
        config = self.config.finetuning.algorithm or self.registry.get("algorithm", DEFAULT_ALGORITHM).config_type()
        return await self._make("algorithm", "finetuning.algorithm", config)

    async def get_model_path(self) -> str | None:
        """Returns the folder or hub id of the model to train; a bundled one is made on first use."""
        model = self.config.finetuning.policy.model
        return None if model is None else await self.get_bundled(model, "finetuning.policy.model")

    async def get_bundled(self, model: str, path: str = "model") -> str:
        """Returns the folder of `bundled:NAME`, made on first use; any other model is returned unchanged."""
        if not model.startswith(BUNDLED):
            return model
        name = model.removeprefix(BUNDLED)
        names = self.registry.names("model")
        if name not in names:
            message = f'there is no bundled model "{name}"{did_you_mean(name, names)}'
            fix = f"use one of: {', '.join(map(BUNDLED.__add__, names))} (`reinforge components model` describes them)"
            raise ConfigError(Problem(path, message, fix, self.loaded.locate(path)))
        component = self.registry.get("model", name, path)
        if not self.makes_models:
            return model
        started = time.monotonic()
        folder = str(await self._make("model", path, component.config_type(), name=name, key=name))
        self.making_s += time.monotonic() - started
        return folder

    def policy(self) -> PolicyServer | None:
        """Returns the policy server of the trainer adapter; None before it is initialized, or if it serves none."""
        return self._adapter.policy() if self._adapter is not None else None

    async def _section(self, kind: str, section: str, name: str, key: str = "") -> Any:
        entries = getattr(self.config, section)
        if name not in entries:
            raise ConfigError(f'{section}: no entry "{name}"; it has {", ".join(entries) or "no entries"}')
        return await self._make(kind, f"{section}.{name}", entries[name], key=key)

    async def _make(self, kind: str, path: str, config: TypedConfig, *, name: str | None = None, key: str = "") -> Any:
        self._refuse_invalid(path)
        if (kind, path, key) not in self._made:
            name = name or self.loaded.types.get(tuple(path.split(".")), str(config.static_type))
            component = self.registry.get(kind, name, path)
            try:
                made = await self._stack.enter_async_context(_enter(component.factory(config, self), path))
            except ConfigError as error:
                raise ConfigError([self.locate(problem, path) for problem in error.problems]) from None
            except ReinforgeError:
                raise
            except Exception as error:
                message = (
                    f'cannot build the {kind.replace("_", " ")} "{name}" ({component.origin}): {describe_error(error)}'
                )
                raise ConfigError(self.locate(Problem("", message), path)) from error
            self._made[kind, path, key] = made
        return self._made[kind, path, key]

    def _refuse_invalid(self, path: str) -> None:
        """Refuses to build a component whose settings are invalid, and what needs it."""
        if tuple(path.split(".")) in self.loaded.invalid:
            raise ConfigError([])

    def locate(self, problem: Problem, component: str = "") -> Problem:
        """Returns a problem with its full path, file and line.

        Args:
            problem: The problem; its path may be relative to the component.
        """
        if problem.location:
            return problem
        path = problem.path
        if path.partition(".")[0] not in Config.model_fields:
            path = f"{component}.{path}" if path else component
        return replace(problem, path=path, location=self.loaded.locate(path))


@asynccontextmanager
async def _enter(generator: AsyncIterator[Any], path: str) -> AsyncIterator[Any]:
    """Runs an async generator up to its yield; the code after the yield is the teardown.

    An error of a teardown is logged, so that it does not hide how the run ended.
    """
    try:
        component = await anext(generator)
    except StopAsyncIteration:
        raise ConfigError(Problem(path, "the factory yields no component", "yield the component once")) from None
    try:
        yield component
    finally:
        try:
            async for _ in generator:
                logger.warning("%s: the factory yields more than one component; only the first is used", path)
        except Exception:  # a user's teardown may raise anything
            logger.exception("%s: teardown failed", path)


class Attempts:
    """Runs one attempt after the other and collects the problems of all."""

    def __init__(self, locate: Callable[[Problem], Problem]) -> None:
        self.locate, self.problems = locate, list[Problem]()

    async def __call__(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Returns the result of `make`, or None after a `ConfigError`."""
        try:
            return await make()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems += map(self.locate, problems)

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)
