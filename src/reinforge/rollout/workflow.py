"""Workflows: the agent as `workflow(item, llm, context)`, a plain or async function or an object with `__call__`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.imports import import_object
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError
from reinforge.errors import PolicyFailure as PolicyFailure
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.rollout.context import CURRENT_EPISODE, EpisodeContext, RunningEpisode
from reinforge.rollout.isolation.containment import Abandoned, Isolation, run_contained
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.workflow import BoundWorkflow


def bind_workflow(function: Any, llm: str | None = None, *, share_environment_seed: bool = True) -> BoundWorkflow:
    """Returns a workflow that is ready to run.

    Args:
        function: A plain or async callable `(item, llm, context)`, or a class with such instances.
        llm: Entry of `llms` to pass as `llm`; None: the only entry, or the only one that is trained.
    """
    if inspect.isclass(function):
        function = function()
    if not callable(function):
        raise ConfigError(f"workflow {function!r} is not callable; write `async def agent(item, llm, context): ...`")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"workflow {getattr(function, '__name__', function)!r} cannot be called as (item, llm, context): {error}"
        ) from None
    call = function if inspect.isroutine(function) else type(function).__call__
    return BoundWorkflow(function, llm, inspect.iscoroutinefunction(call), share_environment_seed)


def refuse_coroutine(output: Any, workflow: BoundWorkflow) -> Any:
    """Returns the agent's output, unless an `await` is missing before it, or the agent yields instead of returning."""
    if inspect.isgenerator(output) or inspect.isasyncgen(output):
        raise TypeError(f"{workflow.source} returned a generator: write `return` instead of `yield`")
    if not inspect.isawaitable(output):
        return output
    name = getattr(output, "__name__", type(output).__name__)
    if inspect.iscoroutine(output):
        output.close()  # otherwise Python warns that it was never awaited
    before = "" if workflow.is_async else " and make the function `async def`"
    raise TypeError(f"{workflow.source} returned a coroutine: write `await` before the call of {name}{before}")


class PythonWorkflowConfig(WorkflowConfig, name="python"):
    """A function or class in the project's folder."""

    function: Any = Field(description="`module:name` in the project's folder; from Python, the callable itself.")
    llm: str | None = Field(
        default=None,
        description="Entry of llms that the agent uses; null: the only entry, or the only one that is trained.",
    )
    share_environment_seed: bool = Field(default=True, description="Run siblings with the same environment seed.")
    isolation: Isolation = Field(
        default="thread",
        description="`thread`: run the agent in this process; `process`: in processes that are killed when it hangs.",
    )


@register_workflow(config_type=PythonWorkflowConfig)
async def python_workflow(config: PythonWorkflowConfig, builder: Builder) -> AsyncIterator[BoundWorkflow]:
    function, share_seed = config.function, config.share_environment_seed
    if config.isolation == "process":
        from reinforge.rollout.isolation.isolated_agent import open_isolated

        opened = open_isolated(function, builder.project_root, config.llm, share_environment_seed=share_seed)
        async with opened as workflow:
            yield workflow
        return
    if isinstance(function, str):
        function = import_object(function, builder.project_root, path="function")
    yield bind_workflow(function, config.llm, share_environment_seed=share_seed)


def enter_agent(workflow: BoundWorkflow, item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
    CURRENT_EPISODE.set(RunningEpisode(item, context))
    return workflow.function(item, llm, context)


async def call_agent(
    workflow: BoundWorkflow, item: EvalInputItem, llm: Any, context: EpisodeContext, timeout_s: float | None
) -> Any:
    """Returns what the agent returns: an async one runs in its own task, a plain one in a daemon thread."""
    if workflow.is_async:
        return await run_contained(lambda: enter_agent(workflow, item, llm, context), timeout_s)
    finished = False

    def work() -> Any:
        nonlocal finished
        try:
            return enter_agent(workflow, item, llm, context)
        finally:
            finished = True

    try:
        async with asyncio.timeout(timeout_s):
            return await run_in_daemon_thread(work, f"episode-{context.example_id}")
    except TimeoutError:
        if not finished:
            raise Abandoned from None
        raise
