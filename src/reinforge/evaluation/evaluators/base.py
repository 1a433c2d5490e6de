"""Calls evaluators and validates their scores: a number, or a missing score with the reason."""

from __future__ import annotations

import asyncio
import math
import statistics
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from reinforge.errors import EvaluationError, describe_error, show
from reinforge.evaluation.answers import UnusableOutputError
from reinforge.files import find_unwritable
from reinforge.interfaces import Evaluator, GroupEvaluator
from reinforge.limits import get_limits
from reinforge.rollout.isolation.containment import TimedOut, run_contained
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.evaluation import MAX_SCORE, EvalInput, EvalInputItem, EvalOutput, EvalOutputItem

T = TypeVar("T")

MAX_INLINE_CHARACTERS = 10_000  # longer texts are compared in a thread, so that the event loop never waits long


async def score_item(evaluator: Evaluator, item: EvalInputItem, timeout_s: float | None = None) -> EvalOutputItem:
    """Returns the evaluator's score of one example as a float of at most `MAX_SCORE`.

    If the evaluator raises, times out, or returns None, NaN, infinity, a number beyond `MAX_SCORE` or something that is
    not a number, the score is missing: `score=None` with the reason in `error`. It is never 0.0, since no evaluator
    gave that score. An `UnusableOutputError` is the answer's failure and scores 0.0.
    """

    async def score() -> EvalOutputItem:  # a result may raise where it is read, as the evaluator may
        return _check_result(item, await evaluator.evaluate(item))

    try:
        return await call_contained(score, timeout_s)
    except UnusableOutputError as error:
        return EvalOutputItem(id=item.id, score=0.0, reasoning=show(error))
    except EvaluatorFailed as error:
        return missing_score(item, str(error))


async def score_group(
    evaluator: GroupEvaluator, items: Sequence[EvalInputItem], timeout_s: float | None = None
) -> list[EvalOutputItem]:
    """Returns the evaluator's scores of several answers to one example, each as `score_item` does.

    If the evaluator raises, exceeds `timeout_s` per answer, or does not return one score for each, all are missing.
    """
    limit_s = None if timeout_s is None else timeout_s * len(items)

    async def score() -> list[EvalOutputItem]:
        results: Any = await evaluator.evaluate_group(items)
        if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(items):
            count = f"{len(results)} scores" if isinstance(results, list | tuple) else type(results).__name__
            return [missing_score(item, f"the evaluator returned {count} for {len(items)} answers") for item in items]
        return [_check_result(item, result) for item, result in zip(items, results, strict=True)]

    try:
        return await call_contained(score, limit_s)
    except (EvaluatorFailed, UnusableOutputError) as error:
        return [missing_score(item, show(error)) for item in items]


class EvaluatorFailed(Exception):
    """An evaluator gave no result; the message says why."""


async def call_contained(evaluate: Callable[[], Awaitable[T]], timeout_s: float | None) -> T:
    """Returns what an evaluator or a reward of the user returns; raises an `EvaluatorFailed` whatever it raises."""
    try:
        return await run_contained(evaluate, timeout_s)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EvaluatorFailed("the evaluator raised CancelledError") from None
    except UnusableOutputError:
        raise
    except TimedOut as error:
        raise EvaluatorFailed(str(error) or f"the evaluator timed out after {timeout_s:g} s") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's evaluator may raise anything
        raise EvaluatorFailed(describe_error(error)) from None


def _check_result(item: EvalInputItem, result: Any) -> EvalOutputItem:
    if not isinstance(result, EvalOutputItem):
        result = EvalOutputItem(id=item.id, score=result, reasoning=None)
    if (why := find_unwritable(result.reasoning, max_chars=get_limits().output_chars)) is not None:
        return missing_score(item, f"the evaluator's reasoning cannot be recorded: {why}")
    if result.error is not None:
        return missing_score(item, result.error, result.reasoning)
    score = to_score(result.score)
    if score is None:
        return missing_score(item, f"the evaluator returned {describe_refusal(result.score)}", result.reasoning)
    return EvalOutputItem(id=item.id, score=score, reasoning=result.reasoning)


def missing_score(item: EvalInputItem, reason: str, reasoning: Any = None) -> EvalOutputItem:
    return EvalOutputItem(id=item.id, score=None, reasoning=reasoning, error=reason)


def to_score(value: Any) -> float | None:
    """Returns a number or bool as a float of at most `MAX_SCORE`; None for anything else."""
    number = to_number(value)
    return number if number is not None and abs(number) <= MAX_SCORE else None


def to_number(value: Any) -> float | None:
    """Returns a number or bool as a finite float; None for anything else."""
    if not isinstance(value, Real | np.bool_):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def describe_refusal(value: Any) -> str:
    """Returns a value that is not a score, and why: `nan, not a finite number`."""
    if to_number(value) is None:
        return f"{_describe(value)}, not a finite number"
    return f"{_describe(value)}, beyond the largest score of {MAX_SCORE:g}; divide the scores by a constant"


def _describe(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, Real):
        return str(value)[:40]
    return f'"{value[:40]}"' if isinstance(value, str) else type(value).__name__


def check_output(value: Any) -> None:
    """Raises an `UnusableOutputError` for an output that no record and no message can hold."""
    if (why := find_unwritable(value)) is not None:
        raise UnusableOutputError(f"the output cannot be converted to a string: {why}")


def to_text(value: Any) -> str:
    """Returns an output or an expected output as a string, empty for None, or raises `UnusableOutputError`."""
    check_output(value)
    return "" if value is None else str(value)


async def run_beside(work: Callable[[], T], size: int | None = None) -> T:
    """Returns the result of work that blocks, in a thread unless it looks at few characters (`size`)."""
    if size is not None and size <= MAX_INLINE_CHARACTERS:
        return work()
    return await run_in_daemon_thread(work, "evaluator")


class BaseEvaluator(Evaluator):
    """Scores item by item, `max_concurrency` at a time; write `evaluate_item`. `tqdm_desc` is not shown."""

    def __init__(self, max_concurrency: int = 4, tqdm_desc: str = "Evaluating"):
        self.max_concurrency, self.tqdm_desc = max_concurrency, tqdm_desc

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem: ...

    async def evaluate(self, item: Any) -> Any:
        """Returns the `EvalOutput` of an `EvalInput`, or the `EvalOutputItem` of a single item."""
        if not isinstance(item, EvalInput):
            return await self.evaluate_item(item)
        limit = asyncio.Semaphore(self.max_concurrency)

        async def score(each: EvalInputItem) -> EvalOutputItem:
            async with limit:
                try:
                    return await self.evaluate_item(each)
                except Exception as error:  # noqa: BLE001  a user's evaluator may raise anything; the score is then missing
                    return EvalOutputItem(id=each.id, score=None, reasoning=None, error=describe_error(error))

        items = list(await asyncio.gather(*map(score, item.eval_input_items)))
        known = [reward for each in items if (reward := each.as_reward()) is not None]
        return EvalOutput(average_score=statistics.fmean(known) if known else None, eval_output_items=items)


class EvaluatorInfo(Evaluator):
    """An evaluator as an async function from `EvalInput` to `EvalOutput`."""

    def __init__(self, *, config: Any, evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]], description: str):
        self.config, self.evaluate_fn, self.description = config, evaluate_fn, description

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        output = await self.evaluate_fn(EvalInput(eval_input_items=[item]))
        if len(output.eval_output_items) != 1:
            count = len(output.eval_output_items)
            raise EvaluationError(f"the evaluator returned {count} scores for an evaluation of one example")
        return output.eval_output_items[0]
