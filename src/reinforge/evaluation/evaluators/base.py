"""The one place where a score is checked: a number, or missing with the reason."""

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

    An evaluator that raises, hangs, or gives None, NaN, infinity or no number, makes the score missing: `score=None`
    with the reason in `error`. It is never 0.0, which would be a judgement that nobody made.

    Args:
        evaluator: Scores.
        item: The example with the agent's output.
        timeout_s: Seconds that it may take; None: any.
    """
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            result = await evaluator.evaluate(item)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return missing(item, "the evaluator cancelled itself")
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a user's evaluator raises: missing, with the reason
        late = isinstance(error, TimeoutError) and clock.expired()
        return missing(item, f"the evaluator did not answer within {timeout_s:g} s" if late else describe_error(error))
    if not isinstance(result, EvalOutputItem):
        result = EvalOutputItem(id=item.id, score=result, reasoning=None)
    if result.error is not None:
        return missing(item, result.error, result.reasoning)
    score = as_score(result.score)
    if score is None:
        return missing(item, f"the evaluator returned {_shown(result.score)}, not a finite number", result.reasoning)
    return EvalOutputItem(id=item.id, score=score, reasoning=result.reasoning)


def missing(item: EvalInputItem, why: str, reasoning: Any = None) -> EvalOutputItem:
    """Returns a missing score with its reason."""
    return EvalOutputItem(id=item.id, score=None, reasoning=reasoning, error=why)


def as_score(value: Any) -> float | None:
    """Returns a finite float for a number or a truth value; None for anything else."""
    if not isinstance(value, Real | np.bool_):
        return None
    try:
        score = float(value)
    except OverflowError:
        return None
    return score if math.isfinite(score) else None


def _shown(value: Any) -> str:
    if value is None or isinstance(value, Real):
        return str(value)[:40]
    return f'"{value[:40]}"' if isinstance(value, str) else type(value).__name__


def text_of(value: Any) -> str:
    """Returns an output or an expected output as text; empty for None."""
    return "" if value is None else str(value)
