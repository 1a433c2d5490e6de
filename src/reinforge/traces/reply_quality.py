"""Which replies of the large model are imitated: by the scores of an evaluator, and by a vote of several.

scores 1, 1, 0, 1            the third reply is below half of the best score: nothing is trained on it
scores 0.9, 0.7, 0.8, 0.3    the last one is

replies "a" (recorded), "b", "A."    "a" is imitated: 2 of 3 agree
replies "a", "b", "c"                none is

The reply that most samples agree with is more often right than a single one (self-consistency, arXiv:2203.11171).
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.config.loader import load_config
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.reference import read_reply
from reinforge.routing.signals import AGREEMENT, simplify_reply
from reinforge.trainer.setup.components import ComponentBuilder

SHARE_OF_BEST = 0.5
LEAST_AGREEMENT = 0.5  # share of a prompt's replies that must agree with the one that is imitated

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyQuality:
    """Scores of replies."""

    scores: Mapping[str, float | None]  # by id of the row; None: the evaluator has none
    floor: float | None = None  # replies with a lower score are not trained on; None: all are
    what: str = "replies score"

    def is_bad(self, id_: str) -> bool:
        score = self.scores.get(id_)
        return self.floor is not None and score is not None and score < self.floor

    def __str__(self) -> str:
        known = [score for score in self.scores.values() if score is not None]
        if not known:
            return "the evaluator has no score for any recorded reply; all are trained on"
        missing = f"; {len(self.scores) - len(known):,} have no score" if len(known) < len(self.scores) else ""
        mean = f"the {self.what} {statistics.fmean(known):.3f} on average{missing}"
        if self.floor is None:
            return f"{mean}; all are trained on"
        return f"{mean}; nothing is trained on the {sum(map(self.is_bad, self.scores)):,} below {self.floor:g}"


def find_bad_replies(scores: Mapping[str, float | None], least: int) -> ReplyQuality:
    """Returns the scores with half of the best one as floor, if replies are below it and `least` or more are not."""
    best = max((score for score in scores.values() if score is not None), default=0.0)
    found = ReplyQuality(scores, SHARE_OF_BEST * best if best > 0 else None)
    num_bad = sum(map(found.is_bad, scores))
    return found if num_bad and len(scores) - num_bad >= least else ReplyQuality(scores)


def count_votes(rows: Sequence[Row]) -> tuple[Row, float]:
    """Returns the first row with the reply that most agree with, and their share; 0 if as many agree on another."""
    meanings = [simplify_reply(row["messages"]) for row in rows]
    (first, most), *others = Counter(meanings).most_common(2)
    return rows[meanings.index(first)], 0.0 if others and others[0][1] == most else most / len(rows)


async def choose_replies(
    config: Path, evaluator: str | None, groups: Sequence[Sequence[Row]], least: int
) -> tuple[list[Row], ReplyQuality]:
    """Returns the row of each group whose reply is imitated, with its score or its share of the votes in a column.

    With an evaluator, only replies that score well enough have votes.

    Args:
        groups: Rows with one prompt and different replies; their id is that of a row of the dataset.
    """
    if evaluator is None:
        votes = [count_votes(group) for group in groups]
        shares = {str(row["id"]): share for row, share in votes}
        quality = ReplyQuality(shares, LEAST_AGREEMENT, "replies with most votes have a share of")
        return [{**row, AGREEMENT: share} for row, share in votes], quality
    distinct = {(str(row["id"]), simplify_reply(row["messages"])): row for group in groups for row in group}
    scores = dict(zip(distinct, await score_replies(config, evaluator, list(distinct.values())), strict=True))
    best = max((score for score in scores.values() if score is not None), default=0.0)

    def get_score(row: Row) -> float | None:
        return scores[str(row["id"]), simplify_reply(row["messages"])]

    def is_good(row: Row) -> bool:
        return (score := get_score(row)) is None or score >= SHARE_OF_BEST * best

    rows = [count_votes(list(filter(is_good, group)) or group)[0] for group in groups]
    found = find_bad_replies({str(row["id"]): get_score(row) for row in rows}, least)
    return [{**row, evaluator: best if (score := get_score(row)) is None else score} for row in rows], found


async def score_replies(config: Path, evaluator: str, rows: Sequence[Row]) -> list[float | None]:
    """Returns the scores of the rows' last messages, as replies to the examples of these ids."""
    async with ComponentBuilder(load_config(config)) as builder:
        free = asyncio.Semaphore(builder.get_max_concurrency())
        judge, items = await builder.get_evaluator(evaluator), (await builder.get_dataset()).load()
        by_id = {str(item.id): item for item in items}

        async def score(row: Row) -> float | None:
            item = by_id[str(row["id"])].copy_with_updates(output_obj=read_reply(row["messages"][-1]))
            async with free:
                found = await score_item(judge, item)
            return None if found.score is None else float(found.score)

        return await asyncio.gather(*map(score, rows))
