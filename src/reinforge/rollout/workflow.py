"""The agent: `workflow(item, llm, context)`, an async or plain function or an object with `__call__`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reinforge.config.imports import import_object
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import register_workflow
from reinforge.types.evaluation import EvalInputItem


class PolicyFailure(Exception):
    """Raise it in a workflow where the model's answer cannot be used: an illegal act, an unparsable reply.

    The episode counts as the policy's own failure and its reward is the penalty `finetuning.outcomes.policy_error`.

    Attributes:
        output: What the other evaluators look at; None where there is nothing to show.
    """

    def __init__(self, message: str, output: Any = None):
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True)
class BoundWorkflow:
    """A workflow and the entry of `llms` that it is given.

    Attributes:
        function: The callable.
        llm: Entry of `llms` passed as `llm`; None: the only one there is.
        is_async: True if calling it gives an awaitable.
        shares_world: True if siblings meet the same world's seed.
    """

    function: Callable[..., Any]
    llm: str | None
    is_async: bool
    shares_world: bool = True

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        """Returns what the workflow finds wrong with examples before any is run, by its own method of this name."""
        look = getattr(self.function, "example_problems", None)
        return list(look(items)) if callable(look) else []


def bind_workflow(function: Any, llm: str | None = None, *, shares_world: bool = True) -> BoundWorkflow:
    """Returns a workflow ready to run.

    Args:
        function: An async or plain callable `(item, llm, context)`, or a class whose instances are one.
        llm: Entry of `llms` that it is given.
        shares_world: Siblings meet the same world's seed.

    Raises:
        ConfigError: It is not callable with three arguments.
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
    return BoundWorkflow(function, llm, inspect.iscoroutinefunction(call), shares_world)


class PythonWorkflowConfig(WorkflowConfig, name="python"):
    """A function or class below the project."""

    function: Any = Field(description="`module:name` below the project's folder; from Python, the callable itself.")
    llm: str | None = Field(default=None, description="Entry of llms that it is given; null: the only one.")
    shares_world: bool = Field(default=True, description="Siblings meet the same world's seed.")


@register_workflow(config_type=PythonWorkflowConfig)
async def python_workflow(config: PythonWorkflowConfig, builder: Any) -> AsyncIterator[BoundWorkflow]:
    """Yields the user's own function."""
    function = config.function
    if isinstance(function, str):
        function = import_object(function, builder.project_root, path="function")
    yield bind_workflow(function, config.llm, shares_world=config.shares_world)
