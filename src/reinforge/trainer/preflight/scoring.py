"""Scores sampled answers a second time, to see how much of the spread of rewards is noise of the evaluator."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from reinforge.evaluation.evaluators.base import score_group
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import GroupEvaluator
from reinforge.rollout.episode import with_steps
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Outcome

MAX_RESCORED = 40  # answers that are scored a second time; a judge may be slow and paid for

Pairs = list[tuple[float, float]]


async def score_twice(
    evaluation: DatasetEvaluation, records: Sequence[EpisodeRecord], max_concurrency: int
) -> tuple[Pairs, str]:
    """Returns the first and a second score of the same answers, or why there are none."""
    answered = [each for each in records if each.outcome is Outcome.OK and each.reward is not None]
    if not answered:
        return [], "no answer has a score"
    evaluator = evaluation.evaluators[evaluation.reward_metric]
    if isinstance(evaluator, GroupEvaluator):
        pairs = await _compare_again(evaluation, evaluator, answered)
    elif isinstance(evaluator, Weighted) and any(
        isinstance(evaluation.evaluators.get(part), GroupEvaluator) for part in evaluator.weights
    ):
        return [], "a part of the reward compares answers with each other"
    else:
        chosen = sorted(answered, key=lambda record: record.key.generation)[:MAX_RESCORED]
        pairs = await _score_singly(evaluation, chosen, max_concurrency)
    return pairs, "" if pairs else "the second time, no answer got a score"


async def _score_singly(evaluation: DatasetEvaluation, records: Sequence[EpisodeRecord], max_concurrency: int) -> Pairs:
    limit = asyncio.Semaphore(max_concurrency)

    async def score(record: EpisodeRecord) -> tuple[float | None, float | None]:
        async with limit:
            return record.reward, (await evaluation.score_again(record)).reward

    both = await asyncio.gather(*map(score, records))
    return [(first, second) for first, second in both if first is not None and second is not None]


async def _compare_again(
    evaluation: DatasetEvaluation, evaluator: GroupEvaluator, records: Sequence[EpisodeRecord]
) -> Pairs:
    """Returns both scores of answers that are scored by comparing those to one example."""
    by_example: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in records:
        by_example[record.key.example_id].append(record)
    pairs: Pairs = []
    timeout_s = evaluation.runner.limits.evaluator_timeout_s
    for siblings in by_example.values():
        if len(siblings) < 2 or len(pairs) >= MAX_RESCORED:
            continue
        items = [with_steps(each) for each in siblings]
        outputs = await score_group(evaluator, items, timeout_s)
        firsts = [each.scores[evaluation.reward_metric].as_reward() for each in siblings]
        both = zip(firsts, (output.as_reward() for output in outputs), strict=True)
        pairs += [(first, second) for first, second in both if first is not None and second is not None]
    return pairs
