"""Lets a judge model choose the better of two answers, in both orders.

    a before b: "1" wins    b before a: "2" wins    =>  a wins both: 1
    a before b: "1" wins    b before a: "1" wins    =>  the judge prefers the first: 0.5 for both
    a before b: "1" wins    b before a: "tie"       =>  a 0.75, b 0.25

`against: siblings` compares the siblings of a group with each other; the score is the mean over an answer's opponents.
`against: expected` compares each answer with the example's expected answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field

from reinforge.evaluation.evaluators import comparison, judging
from reinforge.interfaces import Builder, ChatModel, Evaluator, GroupEvaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.seeding import stable_random

POINTS = {"1": 1.0, "2": 0.0, "tie": 0.5}  # points of the answer that stands first, by what the judge says

TASK = """\
Say which of the two answers is better by the rubric, or "tie" if they are equally good. Reply with one JSON object and
nothing else: {"reason": "one or two sentences", "winner": "1" or "2" or "tie"}"""

SCHEMA = judging.build_schema(winner={"type": "string", "enum": list(POINTS)})


class PairwiseJudgeConfig(comparison.ComparisonConfig, name="pairwise_judge"):
    """Lets a judge choose the better of two answers, in both orders; the score is the share of wins."""

    against: Literal["siblings", "expected"] = Field(
        default="siblings",
        description="siblings: an answer is compared with its siblings, and on select and confirm with `reference`; "
        "expected: always with the example's expected answer.",
    )
    max_opponents: int | None = Field(
        default=4,
        ge=2,
        multiple_of=2,
        description="With how many siblings each answer is compared, an even number; null: all. A pair costs two "
        "requests, so 8 siblings with 4 opponents each cost 32.",
    )


class PairwiseJudge(GroupEvaluator):
    """Asks the judge about pairs of answers."""

    def __init__(self, config: PairwiseJudgeConfig, llm: ChatModel, max_concurrency: int = 8):
        self.config, self.llm, self.reference = config, llm, config.reference
        self._requests = asyncio.Semaphore(max_concurrency)

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Returns the share of wins of each answer; equal answers tie without asking the judge."""
        found = comparison.build_contestants(items, self.config.shows)
        pairs = choose_pairs(len(found.answers), self.config.max_opponents, *found.answers)
        results = await asyncio.gather(*(self._compare(items[0], found, pair) for pair in pairs))
        duels = dict(zip(pairs, results, strict=True))
        return [_summarize(item, index, found.places, duels) for index, item in enumerate(items)]

    async def _compare(
        self, item: EvalInputItem, contestants: comparison.Contestants, pair: tuple[int, int]
    ) -> tuple[float, list[str]]:
        """Returns the points of the first answer of a pair, the mean of both orders, and the judge's reasons."""
        (first, why_first), (second, why_second) = await asyncio.gather(
            self._judge(item, contestants, pair), self._judge(item, contestants, pair[::-1])
        )
        return (first + 1 - second) / 2, [why_first, why_second]

    async def _judge(
        self, item: EvalInputItem, contestants: comparison.Contestants, order: Sequence[int]
    ) -> tuple[float, str]:
        messages = comparison.build_comparison(self.config, item, contestants, order, TASK)
        async with self._requests:
            return await judging.ask_for_verdict(self.llm, self.config, messages, SCHEMA, parse_winner)


class ExpectedPairwiseJudge(Evaluator):
    """Compares each answer with the expected one: 1 if it is better, 0.5 if they are equally good, 0 if it is worse."""

    def __init__(self, judge: PairwiseJudge):
        self.judge = judge

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        return await self.judge.evaluate(item)


def parse_winner(text: str) -> tuple[float, str]:
    """Returns the points of the answer that stands first, and the reason."""
    verdict = judging.parse_reply(text, ["winner"])
    winner = verdict["winner"]
    if not isinstance(winner, str) or winner not in POINTS:
        raise judging.InvalidVerdictError(f'the winner must be "1", "2" or "tie", found {str(winner)[:80]!r}')
    return POINTS[winner], judging.check_reason(verdict)


def choose_pairs(count: int, max_opponents: int | None, *names: str) -> list[tuple[int, int]]:
    """Returns the pairs of `count` answers to compare: all, or so many that each answer meets `max_opponents` others.

    The answers are put in a circle, in a random order derived from `names`, and each meets its next neighbors.

    Example: 4 answers -> 6 pairs; 6 answers with 2 opponents -> 6 pairs, a circle.
    """
    if max_opponents is None or max_opponents >= count - 1:
        return [(one, other) for one in range(count) for other in range(one + 1, count)]
    circle = stable_random(0, "pairs", *names).sample(range(count), count)
    return [
        (circle[place], circle[(place + step) % count])
        for step in range(1, max_opponents // 2 + 1)
        for place in range(count)
    ]


def _summarize(
    item: EvalInputItem, index: int, places: Sequence[int], duels: dict[tuple[int, int], tuple[float, list[str]]]
) -> EvalOutputItem:
    """Returns the mean of an answer's comparisons: with equal answers 0.5, with the others as the judge said."""
    own, points, reasons = places[index], list[float](), list[str]()
    for other in (place for number, place in enumerate(places) if number != index):
        if other == own:
            points.append(0.5)
        elif (own, other) in duels:
            points.append(duels[own, other][0])
            reasons += duels[own, other][1]
        elif (other, own) in duels:
            points.append(1 - duels[other, own][0])
            reasons += duels[other, own][1]
    reasoning: dict[str, Any] = {"points": points, "reasons": list(dict.fromkeys(reasons))}
    return EvalOutputItem(id=item.id, score=sum(points) / len(points), reasoning=reasoning)


@register_evaluator(config_type=PairwiseJudgeConfig)
async def pairwise_judge(config: PairwiseJudgeConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    judge = PairwiseJudge(config, await judging.get_judge(config.llm, builder), builder.get_max_concurrency())
    yield ExpectedPairwiseJudge(judge) if config.against == "expected" else judge
