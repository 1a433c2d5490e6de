"""A function of the user's own.

def reward(item):               # item.input_obj, item.expected_output_obj, item.output_obj, item.full_dataset_entry
    return 1.0 if item.output_obj == item.expected_output_obj else 0.0

def reward(output, expected):   # or just the two
    return output == expected
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from reinforge.config.imports import import_object
from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.rollout.threads import in_daemon_thread
from reinforge.types.evaluation import EvalInputItem

CONTRACT = "write reward(item) or reward(output, expected), async or plain"


class PythonEvaluatorConfig(EvaluatorConfig, name="python"):
    """A function that returns a number, a truth value, an `EvalOutputItem`, or None where it cannot tell."""

    function: Any = Field(description="`module:name` below the project's folder; from Python, the callable itself.")

    @field_validator("function")
    @classmethod
    def _is_named_or_callable(cls, value: Any) -> Any:
        if not isinstance(value, str) and not callable(value):
            raise ValueError(f'expected "module:name", found {type(value).__name__}; {CONTRACT}')
        return value


class PythonEvaluator(Evaluator):
    """Calls the user's function; a plain one runs on a thread, so that one that hangs is left behind.

    Several answers are scored side by side.

    Args:
        function: One parameter without default: it is given the item. Two: output and expected output.

    Raises:
        ConfigError: It cannot be called so.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.takes_item = _num_required(function) == 1
        called = function if inspect.isroutine(function) else type(function).__call__
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))

    async def evaluate(self, item: EvalInputItem) -> Any:
        """Returns what the function returned; `score_item` says what of it is a score."""
        arguments = (item,) if self.takes_item else (item.output_obj, item.expected_output_obj)
        if self.is_async:
            return await self.function(*arguments)
        result = await in_daemon_thread(lambda: self.function(*arguments), "evaluator")
        return await result if inspect.isawaitable(result) else result


def _num_required(function: Callable[..., Any]) -> int:
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"the evaluator's function {name} is not a function; {CONTRACT}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(f"the evaluator's function {name} hides its parameters; {CONTRACT}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = len(required) or min(len(positional), 1)
    if keywords or count not in (1, 2):
        raise ConfigError(f"the evaluator's function {name}{inspect.signature(function)} cannot be called; {CONTRACT}")
    return count


@register_evaluator(config_type=PythonEvaluatorConfig)
async def python_evaluator(config: PythonEvaluatorConfig, builder: Any) -> AsyncIterator[PythonEvaluator]:
    """Yields the user's own function as an evaluator."""
    function = config.function
    if isinstance(function, str):
        root: Path = builder.project_root
        function = import_object(function, root, path="function")
    yield PythonEvaluator(function)
