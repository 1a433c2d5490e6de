"""Environments of the package verifiers, which plays its episodes itself: `environment: verifiers:my_env`.

    before 0.2    a module with `load_environment` (SingleTurnEnv, MultiTurnEnv, rubrics)
    from 0.4 on   a module that exports a `Taskset` (tasks, harnesses, traces)

The package pins what others need otherwise, so it lives in a virtual environment of its own, whose interpreter is
`python`. Its rollouts call the policy at the endpoint of their episode; several of them run in one process.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
import logging
import os
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from pydantic import Field

from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, PolicyFailure, Problem, show
from reinforge.interfaces import Builder, Environment, EnvironmentSource
from reinforge.registry import register_environment, register_workflow
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.episode import extract_text
from reinforge.rollout.workflows.outside_agent import AgentFailed, AgentWorkflowConfig, OutsideWorkflow, open_access
from reinforge.types.environment import Observation, Reply, StepResult
from reinforge.types.evaluation import EvalInputItem

PACKAGE, CHAT = "verifiers", "reinforge_chat"  # the package, and the harness that a taskset has where it names none
FAILURE, MODEL_ERRORS = "failure", ("ModelError", "ProviderError")
"""Why a rollout has no reward, and errors of model calls: whose failure these are, only the calls tell."""
ENDLESS_SIZE = 600  # tasks of an endless taskset, unless the configuration says how many


class VerifiersConfig(EnvironmentConfig, name="verifiers"):
    """An environment or a taskset of the package verifiers, which plays its episodes itself."""

    install: ClassVar[str] = "python -m venv .venvs/verifiers && .venvs/verifiers/bin/pip install verifiers"
    license: ClassVar[str] = "MIT"
    is_concurrent: ClassVar[bool] = True

    name: str = Field(description="The environment's or taskset's module, installed there or in the project's folder.")
    python: Path | None = Field(
        default=None, description="Interpreter of the virtual environment that has verifiers; null: the run's own."
    )
    arguments: dict[str, Any] = Field(
        default={}, description="Arguments of `load_environment`; with a taskset, keys of the package's `env` block."
    )
    size: int | None = Field(
        default=None, ge=3, description=f"Maximum number of tasks; null: all, and {ENDLESS_SIZE} of an endless taskset."
    )
    step_timeout_s: float = Field(default=600.0, gt=0, description="Seconds that an episode may take.")

    @classmethod
    def list_names(cls) -> list[str]:
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(Problem("python", "the package verifiers is not installed", cls.install))
        return []

    @classmethod
    def build_sections(cls, settings: dict[str, Any]) -> dict[str, Any]:
        limits = {"episode_timeout_s": settings.get("step_timeout_s", cls.model_fields["step_timeout_s"].default)}
        return {"workflow": {"_type": PACKAGE}, "finetuning": {"limits": limits}}

    def find_interpreter(self, project_root: Path) -> str:
        if self.python is None:
            return sys.executable
        found = project_root / self.python.expanduser()  # not resolved: that of a virtual environment is a link
        if not found.is_file():
            raise ConfigError(Problem("environment.python", f"there is no interpreter {found}", self.install))
        return str(found)


class VerifiersWorkflowConfig(AgentWorkflowConfig, name="verifiers"):
    """The package verifiers plays its own environment, with the policy as its model."""

    max_tokens: int | None = Field(
        default=256, ge=1, description="Maximum tokens of a reply; null: up to the context limit."
    )


@register_workflow(config_type=VerifiersWorkflowConfig)
async def verifiers_workflow(config: VerifiersWorkflowConfig, builder: Builder) -> AsyncIterator[OutsideWorkflow]:
    sampling = {} if config.max_tokens is None else {"max_tokens": config.max_tokens}
    async with open_access(builder, PACKAGE) as accesses:

        async def play(item: EvalInputItem, llm: Any, context: EpisodeContext) -> str:
            environment: Any = context.environment  # type: ignore[attr-defined]
            await environment.reset()
            async with accesses.open(context) as access:
                endpoint = Endpoint(access.base_url, access.api_key, context.endpoint.default, sampling)
                result = await environment.step(json.dumps(vars(endpoint)))
            if (failure := result.info.get(FAILURE)) is not None:
                raise AgentFailed(f"verifiers could not finish the rollout: {failure}")
            return extract_text(context.calls[-1].reply.message.get("content")) if context.calls else ""

        yield OutsideWorkflow(play, config.llm, True, config.share_environment_seed, name=PACKAGE)


@dataclass
class Endpoint:
    """Where a rollout finds its model."""

    base_url: str
    api_key: str
    model: str
    sampling: dict[str, Any]

    @contextmanager
    def name_key(self) -> Iterator[str]:
        """Yields the name of a variable of this process with the key, as the package wants it."""
        name = f"REINFORGE_API_KEY_{id(self)}"
        os.environ[name] = self.api_key
        try:
            yield name
        finally:
            del os.environ[name]


@register_environment(config_type=VerifiersConfig)
async def verifiers(config: VerifiersConfig, builder: Any) -> AsyncIterator[EnvironmentSource]:
    sys.path.append(str(builder.project_root))
    if importlib.util.find_spec(PACKAGE) is None:
        fix = f"{config.install}, then set `python: .venvs/verifiers/bin/python`"
        raise ConfigError(Problem("python", f"the package verifiers is not installed in {sys.prefix}", fix))
    is_classic = importlib.util.find_spec(f"{PACKAGE}.envs") is not None
    try:
        source = ClassicRollouts(config) if is_classic else TaskRollouts(config)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the user's module may raise anything
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:  # the package's message hides them
            causes.append(cause)
        message = "; ".join(f"{type(each).__name__}: {show(each)}" for each in causes)
        raise ConfigError(Problem("name", f"verifiers cannot load {config.name}: {message}")) from None
    async with source.serve():
        yield source


class Rollouts(EnvironmentSource):
    """Rows such as `{"id": "my_env-00003", "question": ..., "answer": ..., "row": {...}}`."""

    def __init__(self, config: VerifiersConfig):
        self.config = config

    def load(self) -> list[EvalInputItem]:
        return [
            EvalInputItem.from_row({"id": f"{self.config.name}-{index:05}", **json.loads(json.dumps(row))})
            for index, row in enumerate(itertools.islice(self.read_rows(), self.config.size))
        ]

    def create(self) -> Rollout:
        return Rollout(self)

    def serve(self) -> AbstractAsyncContextManager[Any]:
        """Returns what is open while rollouts run."""
        return nullcontext()

    @abstractmethod
    def read_rows(self) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    async def play(self, row: Any, endpoint: Endpoint) -> StepResult: ...


class Rollout(Environment):
    """One rollout; the one reply is the endpoint of its policy."""

    uses_global_random = False  # several run at a time

    def __init__(self, source: Rollouts):
        self.source = source
        self.playing: asyncio.Task[StepResult] | None = None

    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        self.row = item.full_dataset_entry["row"]
        return Observation([{"role": "user", "content": item.input_obj}])

    async def step(self, reply: Reply) -> StepResult:
        try:
            endpoint = Endpoint(**json.loads(reply.text))
        except (ValueError, TypeError):
            raise ValueError("verifiers plays its episodes itself: it needs `workflow: {_type: verifiers}`") from None
        self.playing = asyncio.create_task(self.source.play(self.row, endpoint))
        limit_s = self.source.config.step_timeout_s
        if not (await asyncio.wait({self.playing}, timeout=limit_s))[0]:
            return StepResult(done=True, info={FAILURE: f"it was not finished after {limit_s:g} s (step_timeout_s)"})
        return self.playing.result()

    async def close(self) -> None:
        if self.playing is not None:
            self.playing.cancel()


def end_without_reward(kind: str, text: str, trace: str = "") -> StepResult:
    """Returns the end of a rollout whose model call failed; any other error is raised as one of the environment."""
    if kind in MODEL_ERRORS:
        return StepResult(done=True, info={FAILURE: text})
    error = RuntimeError(text)
    error.add_note(trace)
    raise error


class ScoringErrors(logging.Handler):
    """Notes what a reward function raised: the package only logs it, and counts 0."""

    current: ContextVar[list[str]] = ContextVar("reward_errors")

    def emit(self, record: logging.LogRecord) -> None:
        if (errors := self.current.get(None)) is not None:
            errors.append(record.getMessage())


class ClassicRollouts(Rollouts):
    """An environment of `load_environment`: its training data, or its evaluation data if it has no other."""

    def __init__(self, config: VerifiersConfig):
        super().__init__(config)
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        self.package: Any = importlib.import_module(PACKAGE)
        self.environment = self.package.load_environment(config.name, **config.arguments)
        if self.environment.requires_group_rollouts:
            message = f"the rubric of {config.name} compares rollouts, so none has a reward alone"
            raise ConfigError(Problem("name", message))
        logging.getLogger("verifiers.rubrics.rubric").addHandler(ScoringErrors(logging.ERROR))

    def read_rows(self) -> Iterator[dict[str, Any]]:
        has_training = self.environment.build_dataset() is not None
        rows = self.environment.get_dataset() if has_training else self.environment.get_eval_dataset()
        for row in rows:
            prompt = row["prompt"]
            question = prompt if isinstance(prompt, str) else extract_text(prompt[-1]["content"])
            yield {"question": question, "answer": row.get("answer"), "row": row}

    async def play(self, row: Any, endpoint: Endpoint) -> StepResult:
        errors: list[str] = []
        ScoringErrors.current.set(errors)
        with endpoint.name_key() as variable:
            client = self.package.ClientConfig(api_base_url=endpoint.base_url, api_key_var=variable, max_retries=0)
            output = await self.environment.run_rollout(
                row, client, endpoint.model, endpoint.sampling, state_columns=["reward", "metrics"]
            )
        if isinstance(error := output.get("error"), Mapping):
            if error["error"] in ("EmptyModelResponseError", "InvalidModelResponseError"):
                raise PolicyFailure(f"verifiers refuses the reply: {error['error_chain_str']}")
            return end_without_reward(error["error"], error["error_chain_str"])
        if errors:
            raise RuntimeError("; ".join(errors))
        return StepResult(reward=output["reward"], done=True, info=output["metrics"])


class TaskRollouts(Rollouts):
    """A taskset; the reward is that of the traces of the one agent that the policy plays, on average."""

    def __init__(self, config: VerifiersConfig):
        super().__init__(config)
        self.vf: Any = importlib.import_module("verifiers.v1")
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        sys.modules[CHAT] = build_chat(self.vf)
        taskset = {**config.arguments.get("taskset", {}), "id": config.name}
        settings = loaders.resolve_env_config({**config.arguments, "taskset": taskset})
        seats = {name: seat for name, seat in settings if isinstance(seat, self.vf.AgentConfig)}
        for seat in seats.values():
            if seat.harness is None and loaders.default_harness_id(config.name) == "bash":
                seat.harness = self.vf.HarnessConfig(id=CHAT)
            if "runtime" not in seat.model_fields_set:
                seat.runtime = self.vf.SubprocessConfig()
        played = [name for name, seat in seats.items() if seat.client is None]
        if len(played) != 1:
            fix = "`arguments: {NAME: {client: {base_url: ...}, model: ...}}` for all but one"
            raise ConfigError(Problem("name", f"the policy would play {', '.join(played) or 'nothing'}", fix))
        (self.seat,) = played
        self.environment = loaders.load_environment(settings)

    def serve(self) -> AbstractAsyncContextManager[Any]:
        return self.environment.serving()

    def read_rows(self) -> Iterator[dict[str, Any]]:
        taskset = self.environment.taskset
        if not taskset.bounded:
            taskset = taskset.take(self.config.size or ENDLESS_SIZE)
        for task in taskset:
            row = task.data.model_dump(mode="json")
            yield {"question": task.data.prompt_text or task.data.name or "", "answer": row.get("answer"), "row": row}

    async def play(self, row: Any, endpoint: Endpoint) -> StepResult:
        task_type = type(self.environment.taskset).task_type()
        task = task_type(task_type.data_type().model_validate(row), self.environment.config.taskset.task)
        with endpoint.name_key() as variable:
            client = self.vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            model = self.vf.ModelContext(endpoint.model, client, self.vf.SamplingConfig(**endpoint.sampling))
            episode = await self.environment.run_episode(task, model)
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            if (first := next(iter(errors), None)) is None:
                return StepResult(done=True, info={FAILURE: "a time limit of the package has passed"})
            return end_without_reward(first.type, f"{first.type}: {first.message}", first.traceback or "")
        traces = [trace for trace in episode.traces if trace.agent.name == self.seat]
        metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
        return StepResult(reward=sum(trace.reward for trace in traces) / len(traces), done=True, info=metrics)


def build_chat(vf: Any) -> ModuleType:
    """Returns a module with a harness that chats without tools; the package's own starts a program for each reply."""
    openai: Any = importlib.import_module("openai")
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire

    class ChatHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(to_wire, prompt or [])
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
                try:
                    await client.chat.completions.create(model=ctx.model, messages=[*messages, *asked])
                except openai.APIError as error:  # also a turn that the task has stopped
                    return vf.ProgramResult(1, "", str(error))
            return vf.ProgramResult(0, "", "")

    module = ModuleType(CHAT)
    vars(module).update(ChatHarness=ChatHarness, __all__=["ChatHarness"])
    return module
