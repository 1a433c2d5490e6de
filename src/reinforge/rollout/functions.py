"""Agents in the form of NeMo Agent Toolkit's functions: they take the example's input alone and find the rest.

    @register_function(config_type=MyConfig)
    async def my_agent(config, builder):
        llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.OPENAI)

        async def answer(question: str) -> str:
            reply = await llm.chat.completions.create(messages=[{"role": "user", "content": question}])
            return reply.choices[0].message.content

        yield FunctionInfo.from_fn(answer, description="Answers a question.")

Such a function gets its model before any episode starts. The client that it gets therefore looks up the episode that it
is called in, so each call is recorded in its own episode. An episode runs in a thread with its own event loop: a
client that blocks inside an `async def` holds up this episode alone.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder
from reinforge.registry import Factory, TypedConfig, register_workflow
from reinforge.rollout.context import CURRENT_EPISODE, EpisodeContext, RunningEpisode, get_episode
from reinforge.rollout.episode import build_invocation_node
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.steps import (
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    InvocationNode,
    LLMFrameworkEnum,
)


class ComponentRef(str):
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


class LLMRef(ComponentRef):
    """A name of an entry of `llms`."""


class FunctionRef(ComponentRef):
    """A name of an entry of `functions`."""


class FunctionInfo:
    """An agent, or a part of one, that takes its input alone.

    Args:
        input_schema: Class of its input; None: the annotation of its only parameter.

    Attributes:
        name: Its entry in `functions`, which is the scope of its model calls; None: the whole agent.
        llm: The entry of `llms` that it trains or calls first; None: the run chooses.
    """

    def __init__(
        self, single_fn: Callable[..., Any], *, description: str | None = None, input_schema: Any = None
    ) -> None:
        if not callable(single_fn):
            raise ConfigError(f"{single_fn!r} is not callable; pass a function, or FunctionInfo.from_fn(function)")
        if inspect.isasyncgenfunction(single_fn):
            raise ConfigError(f"{single_fn.__qualname__} streams its output; write a function that returns it instead")
        self.single_fn, self.description = single_fn, description
        self._parameters = list(inspect.signature(single_fn).parameters.values())
        self.input_schema = input_schema or self._find_schema()
        self.name: str | None = None
        self.llm: str | None = None
        self.__wrapped__ = single_fn  # what messages name as the agent
        self.__signature__ = inspect.signature(self.__call__)

    @classmethod
    def from_fn(cls, fn: Callable[..., Any], *, description: str | None = None, input_schema: Any = None) -> Self:
        return cls(fn, description=description or inspect.getdoc(fn), input_schema=input_schema)

    def __call__(self, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
        token = CURRENT_EPISODE.set(RunningEpisode(item, context))
        try:
            output = self._call(item.input_obj)
            return asyncio.run(_wait(output)) if inspect.isawaitable(output) else output
        finally:
            CURRENT_EPISODE.reset(token)

    async def ainvoke(self, value: Any, to_type: type | None = None) -> Any:
        """Returns the output for an input, inside an episode; its model calls belong to the scope `name`."""
        with get_episode().context.function(self.name or self.single_fn.__name__):
            output = self._call(value)
            output = await output if inspect.isawaitable(output) else output
        return output if to_type is None or isinstance(output, to_type) else to_type(output)

    acall_invoke = ainvoke

    def _call(self, value: Any) -> Any:
        if len(self._parameters) > 1 and isinstance(value, Mapping):
            return self.single_fn(**value)
        schema = self.input_schema
        if isinstance(value, Mapping) and inspect.isclass(schema) and issubclass(schema, BaseModel):
            value = schema.model_validate(value)
        return self.single_fn(value)

    def _find_schema(self) -> Any:
        if len(self._parameters) != 1:
            return None
        try:
            return typing.get_type_hints(self.single_fn).get(self._parameters[0].name)
        except NameError:  # an annotation that exists for type checkers alone
            return None


async def _wait(output: Any) -> Any:
    return await output


def register_function(
    config_type: type[TypedConfig], framework_wrappers: Sequence[str] | None = None
) -> Callable[[Factory], Factory]:
    """Registers an agent, or a part of one.

    Args:
        framework_wrappers: The frameworks that it asks `get_llm` for; `get_llm` itself refuses one without a client.
    """

    def decorate(factory: Factory) -> Factory:
        @functools.wraps(factory)
        async def build(config: Any, builder: Builder) -> AsyncIterator[Any]:
            async for made in factory(config, builder):
                yield _build_agent(made, config, builder)

        register_workflow(config_type)(build)
        return factory

    return decorate


def _build_agent(made: Any, config: TypedConfig, builder: Builder) -> Any:
    """Returns an agent as `(item, llm, context)`; what has that form already is returned unchanged."""
    if not isinstance(made, FunctionInfo):
        if not inspect.isroutine(made) or _takes_an_episode(made):
            return made
        made = FunctionInfo.from_fn(made)
    made.llm = find_named_llm(config, builder.config.llms)
    return made


def _takes_an_episode(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    return True


def find_named_llm(config: Any, llms: Mapping[str, Any]) -> str | None:
    """Returns the entry of `llms` that a component's configuration names, a trained one before others.

    Example: player_model: small, opponent: big; llms {small: policy, big: openai} -> "small".
    """
    named = [
        value
        for field, value in config or ()
        if (isinstance(value, LLMRef) or (isinstance(value, str) and ("llm" in field or "model" in field)))
        and value in llms
    ]
    trained = [name for name in named if llms[name].static_type == "policy"]
    return str((trained or named)[0]) if named else None


class EpisodeLLM:
    """An entry of `llms` for code that gets it before the episode: `llm.chat.completions.create(messages=...)`.

    Await the call in an `async def`; elsewhere it blocks.
    """

    def __init__(self, name: str):
        self.name = name

    @property
    def chat(self) -> EpisodeLLM:
        return self

    @property
    def completions(self) -> EpisodeLLM:
        return self

    def create(self, **arguments: Any) -> Any:
        call = functools.partial(self.create_blocking, **arguments)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call()
        return asyncio.to_thread(call)

    def create_blocking(self, **arguments: Any) -> Any:
        return get_episode().context.llm(self.name).chat.completions.create(**arguments)


def build_client(name: str, wrapper_type: str) -> Any:
    call = f'get_llm("{name}", wrapper_type="{wrapper_type}")'
    own = (
        f'use wrapper_type="{LLMFrameworkEnum.OPENAI}" (OpenAI\'s chat.completions.create), or write the workflow as '
        "`agent(item, llm, context)` and call `llm`"
    )
    if wrapper_type == LLMFrameworkEnum.OPENAI:
        return EpisodeLLM(name)
    if wrapper_type != LLMFrameworkEnum.LANGCHAIN:
        raise ConfigError(Problem("", f"{call}: there is no {wrapper_type} client for a model here", own))
    if importlib.util.find_spec("langchain_core") is None:
        raise ConfigError(Problem("", f"{call}: LangChain is not installed", f"pip install langchain-core, or {own}"))
    from reinforge.rollout.langchain_client import build_chat_model

    return build_chat_model(name, EpisodeLLM(name).create_blocking)


class IntermediateStepManager:
    """Takes the steps that an agent pushes; `Context.get().intermediate_step_manager` returns it."""

    def push_intermediate_step(self, payload: IntermediateStepPayload) -> None:
        """Records the end of a step as a mark of the episode; starts and chunks are not recorded.

        Model calls are recorded by the run, so steps of them are ignored.
        """
        is_call = payload.event_category is IntermediateStepCategory.LLM
        if payload.event_state is IntermediateStepState.END and not is_call:
            get_episode().context.mark(payload)


class ActiveFunction:
    def __init__(self, name: str):
        self.name, self.output = name, None

    def set_output(self, output: Any) -> None:
        self.output = output


class Context:
    """What a function knows about the episode that it runs in; `Context.get()` returns it."""

    @staticmethod
    def get() -> Context:
        get_episode()
        return Context()

    @property
    def input_message(self) -> Any:
        return get_episode().item.input_obj

    @property
    def intermediate_step_manager(self) -> IntermediateStepManager:
        return IntermediateStepManager()

    @property
    def active_function(self) -> InvocationNode:
        return build_invocation_node(get_episode().context.functions)

    @contextmanager
    def push_active_function(self, function_name: str, input_data: Any = None) -> Iterator[ActiveFunction]:
        """Opens a function scope; `target_functions` filters by its name."""
        with get_episode().context.function(function_name):
            yield ActiveFunction(function_name)
