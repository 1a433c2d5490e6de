"""How an evaluator scores the recorded replies, and which of them are too bad to be imitated.

scores 1, 1, 0, 1            the third reply is below half of the best score: nothing is trained on it
scores 0.9, 0.7, 0.8, 0.3    the last one is
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reinforge.config.loader import load_config
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.reference import read_recorded_reply
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInputItem

SHARE_OF_BEST = 0.5
AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class ReplyQuality:
    """Scores of recorded replies."""

    scores: Mapping[str, float | None]  # by id of the row; None: the evaluator has none
    floor: float | None = None  # replies with a lower score are not trained on; None: all are

    def is_bad(self, id_: str) -> bool:
        score = self.scores.get(id_)
        return self.floor is not None and score is not None and score < self.floor

    def __str__(self) -> str:
        known = [score for score in self.scores.values() if score is not None]
        if not known:
            return "the evaluator has no score for any recorded reply; all are trained on"
        missing = f"; {len(self.scores) - len(known):,} have no score" if len(known) < len(self.scores) else ""
        mean = f"the recorded replies score {statistics.fmean(known):.3f} on average{missing}"
        if self.floor is None:
            return f"{mean}; all are trained on"
        return f"{mean}; nothing is trained on the {sum(map(self.is_bad, self.scores)):,} below {self.floor:g}"


def find_bad_replies(scores: Mapping[str, float | None], least: int) -> ReplyQuality:
    """Returns the scores with half of the best one as floor, if replies are below it and `least` or more are not."""
    best = max((score for score in scores.values() if score is not None), default=0.0)
    found = ReplyQuality(scores, SHARE_OF_BEST * best if best > 0 else None)
    num_bad = sum(map(found.is_bad, scores))
    return found if num_bad and len(scores) - num_bad >= least else ReplyQuality(scores)


async def score_replies(config: Path, evaluator: str) -> dict[str, float | None]:
    """Returns the score of each row's recorded reply by an evaluator of a configuration."""
    free = asyncio.Semaphore(AT_A_TIME)
    async with ComponentBuilder(load_config(config)) as builder:
        judge, items = await builder.get_evaluator(evaluator), (await builder.get_dataset()).load()

        async def score(item: EvalInputItem) -> float | None:
            async with free:
                found = await score_item(judge, item.copy_with_updates(output_obj=read_recorded_reply(item)))
            return None if found.score is None else float(found.score)

        return dict(zip((str(item.id) for item in items), await asyncio.gather(*map(score, items)), strict=True))
