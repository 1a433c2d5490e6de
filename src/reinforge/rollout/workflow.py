"""Workflows: the agent as `workflow(item, llm, context)`, a plain or async function or an object with `__call__`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from pydantic import Field

from reinforge.config.imports import import_object
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError
from reinforge.interfaces import Builder
from reinforge.registry import register_workflow
from reinforge.types.workflow import BoundWorkflow


class PolicyFailure(Exception):
    """Raise this in a workflow if the model's answer is unusable: an invalid action, a reply that cannot be parsed.

    The episode counts as a policy failure, and its reward is `finetuning.outcomes.policy_error`.

    Attributes:
        output: The output for the other evaluators, or None.
    """

    def __init__(self, message: str, output: Any = None):
        super().__init__(message)
        self.output = output


def bind_workflow(function: Any, llm: str | None = None, *, share_environment_seed: bool = True) -> BoundWorkflow:
    """Returns a workflow that is ready to run.

    Args:
        function: A plain or async callable `(item, llm, context)`, or a class with such instances.
        llm: Entry of `llms` to pass as `llm`; None: the only entry.
        share_environment_seed: True if siblings run with the same environment seed.

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
    return BoundWorkflow(function, llm, inspect.iscoroutinefunction(call), share_environment_seed)


class PythonWorkflowConfig(WorkflowConfig, name="python"):
    """A function or class in the project's folder."""

    renamed_keys: ClassVar[dict[str, str]] = {"shares_world": "share_environment_seed"}

    function: Any = Field(description="`module:name` in the project's folder; from Python, the callable itself.")
    llm: str | None = Field(default=None, description="Entry of llms that the agent uses; null: the only entry.")
    share_environment_seed: bool = Field(default=True, description="Run siblings with the same environment seed.")


@register_workflow(config_type=PythonWorkflowConfig)
async def python_workflow(config: PythonWorkflowConfig, builder: Builder) -> AsyncIterator[BoundWorkflow]:
    """Yields the user's function as a workflow."""
    function = config.function
    if isinstance(function, str):
        function = import_object(function, builder.project_root, path="function")
    yield bind_workflow(function, config.llm, share_environment_seed=config.share_environment_seed)
