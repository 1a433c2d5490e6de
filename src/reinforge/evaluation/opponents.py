"""What an episode is compared with: its siblings in training, the base model's answer on held-out examples.

    collect         the siblings wait for each other; the last one to end has all of them compared
    validate -1     the base model itself: 0.5 by definition
    validate 3      compared with the answer of validate -1 to the same example
    confirm_tuned   compared with the answer of confirm_base to the same example and with the same sample number

What failed because of the policy is not compared, since it earns its penalty. Where the base model failed or a
sibling is left alone, an answer scores 0.5: with that, base and trained model have the same expected score if they are
equally good, whatever the penalty is.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from reinforge.evaluation.evaluators.base import missing_score, score_group, score_item
from reinforge.evaluation.reasons import ScoreFailures
from reinforge.interfaces import GroupEvaluator
from reinforge.rollout.episode import with_steps
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalOutputItem

NEUTRAL = 0.5  # as good as what it is compared with

BASE_PHASE = {
    "validate": "validate",
    **dict.fromkeys(("confirm_base", "confirm_tuned", "confirm_reference"), "confirm_base"),
    **dict.fromkeys(("regression_base", "regression_tuned"), "regression_base"),
}
"""Phase -> the phase in which the base model answered the same examples, at epoch -1."""
BASELINE = -1

GroupKey = tuple[str, int, int, str]
Compare = Callable[[list[EpisodeRecord]], Awaitable[None]]


class SiblingGroups:
    """The groups of one collection, each compared as soon as its last episode has ended.

    A sibling that had `finished` before the run was interrupted takes part in the comparison, and keeps the score that
    the journal has.
    """

    def __init__(self, keys: Sequence[EpisodeKey], finished: Iterable[EpisodeRecord] = ()):
        self._sizes = Counter(map(_group_of, keys))
        self._compared: dict[GroupKey, asyncio.Event] = defaultdict(asyncio.Event)
        self._records: dict[GroupKey, list[EpisodeRecord]] = defaultdict(list)
        self._is_scored = set[EpisodeKey]()
        for record in finished:
            self._records[_group_of(record.key)].append(record)
            self._is_scored.add(record.key)

    def size(self, record: EpisodeRecord) -> int:
        """Returns the number of siblings that the collection has planned, this one included."""
        return self._sizes[_group_of(record.key)]

    def is_scored(self, record: EpisodeRecord) -> bool:
        return record.key in self._is_scored

    async def join(self, record: EpisodeRecord, compare: Compare) -> None:
        """Waits until all siblings of an episode, missing ones too, have been compared, by the last of them to end."""
        group = _group_of(record.key)
        self._records[group].append(record)
        if len(self._records[group]) < self._sizes[group]:
            await self._compared[group].wait()
            return
        siblings = sorted(self._records.pop(group), key=lambda each: each.key.generation)
        await compare(siblings)
        self._compared[group].set()


class BaseAnswers:
    """The base model's answers to held-out examples; `load` returns those of a phase from the journal."""

    def __init__(self, load: Callable[[str], Iterable[EpisodeRecord]]):
        self._load = load
        self._records: dict[tuple[str, str, int], EpisodeRecord] = {}
        self._loaded = set[str]()

    def add(self, records: Iterable[EpisodeRecord]) -> None:
        for record in records:
            if is_of_base(record.key):
                self._records[record.key.phase, record.key.example_id, record.key.generation] = record

    def find(self, key: EpisodeKey) -> EpisodeRecord | None:
        """Returns the base model's episode of the same example and sample; None: there is none, or it is missing."""
        phase = BASE_PHASE.get(key.phase)
        if phase is None:
            return None
        wanted = (phase, key.example_id, key.generation)
        if wanted not in self._records and phase not in self._loaded:
            self._loaded.add(phase)
            self.add(self._load(phase))
        record = self._records.get(wanted)
        return None if record is None or record.outcome.is_missing else record


class Referee:
    """Has episodes compared by evaluators, and puts the results into their scores."""

    def __init__(self, base_answers: BaseAnswers, failures: ScoreFailures, retries: int, timeout_s: float):
        self.base_answers, self.failures, self.retries, self.timeout_s = base_answers, failures, retries, timeout_s

    def open_groups(self, keys: Sequence[EpisodeKey], finished: Iterable[EpisodeRecord]) -> SiblingGroups:
        return SiblingGroups(keys, finished)

    async def compare_siblings(
        self, groups: SiblingGroups, evaluators: Mapping[str, GroupEvaluator], records: list[EpisodeRecord]
    ) -> None:
        """Scores all episodes of a group; one that is alone among failures is neither better nor worse."""
        compared = [each for each in records if not each.outcome.is_missing and not each.outcome.is_policy_failure]
        for name, evaluator in evaluators.items():
            if len(compared) > 1:
                outputs = await self._score(name, evaluator, compared)
            elif compared and groups.size(compared[0]) == 1:
                outputs = [await self._score_single(name, evaluator, compared[0])]
            else:
                outputs = [_score_neutral(record, "no sibling has an answer to compare with") for record in compared]
            for record, output in zip(compared, outputs, strict=True):
                if not groups.is_scored(record):
                    record.scores[name] = output

    async def compare_with_reference(self, evaluators: Mapping[str, GroupEvaluator], record: EpisodeRecord) -> None:
        """Scores an answer to a held-out example: by the base model's answer to it, or by the expected one."""
        if record.outcome.is_policy_failure:
            return
        for name, evaluator in evaluators.items():
            if evaluator.reference == "expected":
                record.scores[name] = await self._score_by_expected(name, evaluator, record)
            elif is_of_base(record.key):
                record.scores[name] = _score_neutral(record, "the base model's own answer")
            elif (base := self.base_answers.find(record.key)) is None:
                record.scores[name] = missing_score(record.item, _describe_missing_base(record.key.phase))
            elif base.outcome.is_policy_failure:
                record.scores[name] = _score_neutral(record, f"the base model has no answer: {base.outcome}")
            else:
                record.scores[name] = (await self._score(name, evaluator, [base, record]))[1]

    async def _score_single(self, name: str, evaluator: GroupEvaluator, record: EpisodeRecord) -> EvalOutputItem:
        if evaluator.reference == "expected":
            return await self._score_by_expected(name, evaluator, record)
        why = "it compares siblings, and each example has one episode only; collect several (num_generations)"
        self.failures.report(name, record.key.example_id, why)
        return missing_score(record.item, why)

    async def _score_by_expected(self, name: str, evaluator: GroupEvaluator, record: EpisodeRecord) -> EvalOutputItem:
        return (
            await self._repeat(name, record, lambda: _wrap(score_item(evaluator, with_steps(record), self.timeout_s)))
        )[0]

    async def _score(
        self, name: str, evaluator: GroupEvaluator, records: Sequence[EpisodeRecord]
    ) -> list[EvalOutputItem]:
        items = [with_steps(each) for each in records]
        return await self._repeat(name, records[0], lambda: score_group(evaluator, items, self.timeout_s))

    async def _repeat(
        self, name: str, record: EpisodeRecord, score: Callable[[], Awaitable[list[EvalOutputItem]]]
    ) -> list[EvalOutputItem]:
        """Returns the scores of a comparison, which is repeated as a whole if one is missing."""
        for _ in range(self.retries + 1):
            outputs = await score()
            error = next((output.error for output in outputs if output.error is not None), None)
            if error is None:
                break
            self.failures.report(name, record.key.example_id, error)
        return outputs


async def _wrap(score: Awaitable[EvalOutputItem]) -> list[EvalOutputItem]:
    return [await score]


def is_of_base(key: EpisodeKey) -> bool:
    return key.epoch == BASELINE and BASE_PHASE.get(key.phase) == key.phase


def _score_neutral(record: EpisodeRecord, why: str) -> EvalOutputItem:
    return EvalOutputItem(id=record.item.id, score=NEUTRAL, reasoning=why)


def _describe_missing_base(phase: str) -> str:
    if phase not in BASE_PHASE:
        return (
            "it compares answers with the base model's, which only a run of `finetune` has; set `reference: expected` "
            "to compare with the expected answers"
        )
    return "the base model has no answer to this example to compare with, since its own episode is missing"


def _group_of(key: EpisodeKey) -> GroupKey:
    return key.phase, key.epoch, key.round, key.example_id
