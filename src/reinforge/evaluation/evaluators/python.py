"""Scores with a user's function.

def reward(item):               # item.input_obj, item.expected_output_obj, item.output_obj, item.full_dataset_entry
    return 1.0 if item.output_obj == item.expected_output_obj else 0.0

def reward(output, expected):   # or only these two
    return output == expected
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from reinforge.config.imports import import_object
from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError
from reinforge.interfaces import Builder, Evaluator
from reinforge.registry import register_evaluator
from reinforge.rollout.isolation.containment import Isolation, run_contained
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

if TYPE_CHECKING:
    from reinforge.rollout.isolation.worker import JobLink, Perform
    from reinforge.rollout.isolation.worker_pool import WorkerPool
    from reinforge.rollout.isolation.worker_protocol import Message

LOADER = "reinforge.evaluation.evaluators.python:load_scorer"
OUTPUTS = {"output", "completion", "response", "reply", "prediction", "answer"}
NOT_OUTPUTS = {"expected", "expected_output", "target", "reference", "label", "ground_truth", "prompt", "question"}
CONTRACT = "write reward(item) or reward(output, expected), as a plain or an async function"


class PythonEvaluatorConfig(EvaluatorConfig, name="python"):
    """A function that returns a number, a bool, an `EvalOutputItem`, or None if there is no score."""

    function: Any = Field(description="`module:name` in the project's folder; from Python, the callable itself.")
    isolation: Isolation = Field(
        default="thread",
        description="`thread`: call it in this process; `process`: in processes that are killed when it hangs.",
    )

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: Any) -> Any:
        if not isinstance(value, str) and not callable(value):
            raise ValueError(f'expected "module:name", found {type(value).__name__}; {CONTRACT}')
        return value


class PythonEvaluator(Evaluator):
    """Calls the user's function; several answers are scored concurrently.

    With one required parameter it gets the item; with two, the output and the expected output. A plain function runs in
    a daemon thread, so that one that hangs does not block the run.
    """

    is_function = True

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.takes_item = self.reads_steps = _count_parameters(function) == 1
        called = function if inspect.isroutine(function) else type(function).__call__
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))

    async def evaluate(self, item: EvalInputItem) -> Any:
        arguments = (item,) if self.takes_item else (item.output_obj, item.expected_output_obj)
        if self.is_async:
            return await self.function(*arguments)
        result = await run_in_daemon_thread(lambda: self.function(*arguments), "evaluator")
        return await result if inspect.isawaitable(result) else result


class IsolatedEvaluator(Evaluator):
    """Calls the user's function in worker processes, which get no steps."""

    reads_steps, is_function = False, True

    def __init__(self, pool: WorkerPool):
        self.pool = pool

    async def evaluate(self, item: EvalInputItem) -> Any:
        from reinforge.rollout.isolation.worker_protocol import dump_item, load_error

        async with self.pool.lease() as job:
            await job.send({"type": "job", "item": dump_item(item)})
            answer = await job.receive()
            job.is_done = answer["type"] in ("done", "failed")
        if answer["type"] == "failed":
            raise load_error(answer["error"])
        score = answer["result"]
        return EvalOutputItem(**score["item"]) if isinstance(score, dict) and "item" in score else score


def load_scorer(function: str, project_root: Path) -> tuple[Perform, Message]:
    """Returns how to score in a worker process with the function `module:name`."""
    from reinforge.rollout.isolation.worker_protocol import load_item

    evaluator = PythonEvaluator(import_object(function, project_root, path="function"))

    async def perform(job: Message, link: JobLink) -> Any:
        result = await run_contained(lambda: evaluator.evaluate(load_item(job["item"])))
        if isinstance(result, EvalOutputItem):
            return {"item": {**result.model_dump(), "score": _to_plain_number(result.score)}}
        return _to_plain_number(result)

    return perform, {}


def _to_plain_number(score: Any) -> Any:
    return score.item() if isinstance(score, np.generic) else score


def _count_parameters(function: Callable[..., Any]) -> int:
    """Returns the number of required positional parameters, 1 or 2."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"the evaluator's function {name} is not a function; {CONTRACT}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ConfigError(f"cannot read the parameters of the evaluator's function {name}; {CONTRACT}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    count = len(required) or min(len(positional), 1)
    if keywords or count not in (1, 2):
        raise ConfigError(
            f"the evaluator's function {name}{inspect.signature(function)} has the wrong parameters; {CONTRACT}"
        )
    if len(required) == 2 and required[0].name in NOT_OUTPUTS and required[1].name in OUTPUTS:
        raise ConfigError(f"{name} would get the agent's output as its argument `{required[0].name}`; {CONTRACT}")
    return count


@register_evaluator(config_type=PythonEvaluatorConfig)
async def python_evaluator(config: PythonEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    function = config.function
    if config.isolation == "process":
        from reinforge.rollout.isolation.worker_pool import WorkerPool, refuse_other_functions

        pool = WorkerPool(refuse_other_functions(function), builder.project_root, LOADER)
        try:
            await pool.start()
            yield IsolatedEvaluator(pool)
        finally:
            await pool.close()
        return
    if isinstance(function, str):
        root: Path = builder.project_root
        function = import_object(function, root, path="function")
    yield PythonEvaluator(function)
