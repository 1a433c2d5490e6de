"""Ranks the siblings of a group in one call of a judge model, without labels, as ART's RULER does.

    three answers, shown as a b c and as c b a; the judge adds 0.2, 0.1, 0 to what stands first, second, third
    scores  a 0.7  b 0.5  c 0.1  (order a b c)      mean   a 0.6  b 0.5  c 0.2
            a 0.5  b 0.5  c 0.3  (order c b a)      wins over the others: 2, 1, 0 of 2  =>  1, 0.5, 0

Every group is judged in several orders (`build_orders`), so that the judge's preference for places averages out. What
the siblings have in common, and equal answers, are shown once.

The scores of a group have the mean 0.5, so the training reward says nothing about progress. An answer to a `select` or
`confirm` example is compared with the base model's answer: 0.5 is as good, and the verdict is on the difference.

Differs from RULER: the judge's scores are averaged over orders and become shares of wins, a reply without exactly one
score for each answer leaves the whole group's scores missing, and held-out answers are compared with the base model's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Literal

from pydantic import Field, field_validator

from reinforge.evaluation.evaluators import comparison, judging
from reinforge.interfaces import Builder, ChatModel, GroupEvaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem

TASK = """\
Compare the {count} answers by the rubric and give each a score from 0 to 1; equally good answers get the same score.
Reply with one JSON object and nothing else:
{{"reason": "one to three sentences", "scores": {{{scores}}}}}"""


class RelativeJudgeConfig(comparison.ComparisonConfig, name="relative_judge"):
    """Ranks the siblings of a group in one call of a judge; needs no labels. 0.5 is as good as the others."""

    num_orders: int = Field(
        default=2,
        ge=1,
        description="How often a group is judged, each time in another order: 1 or an even number. 2 cancels a "
        "judge's preference that grows evenly from the first answer to the last; as many orders as answers cancel any "
        "preference for places.",
    )
    scale: Literal["rank", "score"] = Field(
        default="rank",
        description="rank: the share of the other answers that an answer beats, ties counting half; score: 0.5 plus "
        "half its mean distance from the others' scores, so that small differences stay small.",
    )

    @field_validator("num_orders")
    @classmethod
    def _check_orders(cls, value: int) -> int:
        if value > 1 and value % 2:
            raise ValueError(f"expected 1 or an even number, found {value}: each order comes with its reverse")
        return value


class RelativeJudge(GroupEvaluator):
    """Asks the judge for the scores of all answers at once, in several orders."""

    def __init__(self, config: RelativeJudgeConfig, llm: ChatModel, max_concurrency: int = 8):
        self.config, self.llm, self.reference = config, llm, config.reference
        self._requests = asyncio.Semaphore(max_concurrency)

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Returns how each answer compares with the others; if all are equal, 0.5 without asking the judge."""
        found = comparison.build_contestants(items, self.config.shows)
        if len(found.answers) == 1:
            return [EvalOutputItem(id=item.id, score=0.5, reasoning="all answers are equal") for item in items]
        orders = comparison.build_orders(len(found.answers), self.config.num_orders, *found.answers)
        verdicts = await asyncio.gather(*(self._judge(items[0], found, order) for order in orders))
        by_answer = [
            [scores[order.index(index)] for (scores, _), order in zip(verdicts, orders, strict=True)]
            for index in range(len(found.answers))
        ]
        means = [math.fsum(scores) / len(scores) for scores in by_answer]
        compare = comparison.compare_ranks if self.config.scale == "rank" else comparison.compare_scores
        compared = comparison.compare_with_others([means[place] for place in found.places], compare)
        reasons = [reason for _, reason in verdicts]
        return [
            EvalOutputItem(
                id=item.id,
                score=score,
                reasoning={
                    "answer": [order.index(place) + 1 for order in orders],
                    "scores": by_answer[place],
                    "reasons": reasons,
                },
            )
            for item, place, score in zip(items, found.places, compared, strict=True)
        ]

    async def _judge(
        self, item: EvalInputItem, contestants: comparison.Contestants, order: Sequence[int]
    ) -> tuple[list[float], str]:
        """Returns the score of the answer in each place, and the judge's reason."""
        labels = [str(place) for place in range(1, len(order) + 1)]
        task = TASK.format(count=len(order), scores=", ".join(f'"{label}": number' for label in labels))
        messages = comparison.build_comparison(self.config, item, contestants, order, task)
        number = {"type": "number", "minimum": 0, "maximum": 1}
        schema = judging.build_schema(scores=judging.build_object_schema(dict.fromkeys(labels, number)))
        parse = partial(parse_scores, labels=labels)
        async with self._requests:
            return await judging.ask_for_verdict(self.llm, self.config, messages, schema, parse)


def parse_scores(text: str, labels: Sequence[str]) -> tuple[list[float], str]:
    """Returns the score of each label, in their order, and the reason.

    Example: `{"reason": "2 is wrong", "scores": {"1": 0.9, "2": 0.1}}` -> ([0.9, 0.1], "2 is wrong"). A label too many
    or too few is an error: the judge has confused the answers.
    """
    verdict = judging.parse_reply(text, ["scores"])
    scores = verdict["scores"]
    if not isinstance(scores, dict) or set(scores) != set(labels):
        has = ", ".join(map(str, scores))[:80] if isinstance(scores, dict) else type(scores).__name__
        raise judging.InvalidVerdictError(
            f"scores must have exactly the keys {', '.join(labels)}, found {has or 'none'}"
        )
    found = [judging.check_score(scores[label], 0, 1, f"the score of answer {label}") for label in labels]
    return found, judging.check_reason(verdict)


@register_evaluator(config_type=RelativeJudgeConfig)
async def relative_judge(config: RelativeJudgeConfig, builder: Builder) -> AsyncIterator[RelativeJudge]:
    yield RelativeJudge(config, await judging.get_judge(config.llm, builder), builder.get_max_concurrency())
