"""Evaluators in the form of NeMo Agent Toolkit's: they score a whole evaluation at once, or item by item.

A run scores one episode at a time, as soon as it has ended, so these are called with evaluations of one item. An
evaluator that compares the answers to one example with each other is a `GroupEvaluator`; one that compares the items of
a whole evaluation is not supported.
"""

from __future__ import annotations

import asyncio
import statistics
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from reinforge.errors import EvaluationError, describe_error
from reinforge.interfaces import Evaluator
from reinforge.types.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem


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
