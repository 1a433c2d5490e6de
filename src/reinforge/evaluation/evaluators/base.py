"""Calls evaluators and validates their scores: a finite number, or a missing score with the reason."""

from __future__ import annotations

import asyncio
import math
from numbers import Real
from typing import Any

import numpy as np

from reinforge.errors import describe_error
from reinforge.interfaces import Evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


async def score_item(evaluator: Evaluator, item: EvalInputItem, timeout_s: float | None = None) -> EvalOutputItem:
    """Returns the evaluator's score of one example as a finite float.

    If the evaluator raises, times out, or returns None, NaN, infinity or something that is not a number, the score is
    missing: `score=None` with the reason in `error`. It is never 0.0, since no evaluator gave that score.

    Args:
        evaluator: The evaluator.
        item: The example with the agent's output.
        timeout_s: Time limit in seconds; None: no limit.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            result = await evaluator.evaluate(item)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return missing_score(item, "the evaluator raised CancelledError")
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's evaluator may raise anything
        late = isinstance(error, TimeoutError) and clock.expired()
        return missing_score(item, f"the evaluator timed out after {timeout_s:g} s" if late else describe_error(error))
    if not isinstance(result, EvalOutputItem):
        result = EvalOutputItem(id=item.id, score=result, reasoning=None)
    if result.error is not None:
        return missing_score(item, result.error, result.reasoning)
    score = to_score(result.score)
    if score is None:
        return missing_score(
            item, f"the evaluator returned {_describe(result.score)}, not a finite number", result.reasoning
        )
    return EvalOutputItem(id=item.id, score=score, reasoning=result.reasoning)


def missing_score(item: EvalInputItem, reason: str, reasoning: Any = None) -> EvalOutputItem:
    """Returns a missing score with the reason."""
    return EvalOutputItem(id=item.id, score=None, reasoning=reasoning, error=reason)


def to_score(value: Any) -> float | None:
    """Returns a number or bool as a finite float; None for anything else."""
    if not isinstance(value, Real | np.bool_):
        return None
    try:
        score = float(value)
    except OverflowError:
        return None
    return score if math.isfinite(score) else None


def _describe(value: Any) -> str:
    if value is None or isinstance(value, Real):
        return str(value)[:40]
    return f'"{value[:40]}"' if isinstance(value, str) else type(value).__name__


def to_text(value: Any) -> str:
    """Returns an output or an expected output as a string; empty for None."""
    return "" if value is None else str(value)
