"""Runs the workflow over a dataset's examples and scores the episodes, under one concurrency limit."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reinforge.config.finetuning_blocks import OutcomesConfig
from reinforge.crash import crash_point
from reinforge.errors import BackendUnavailable, EvaluationError, ReinforgeError, show
from reinforge.evaluation.answers import UnusableOutputError
from reinforge.evaluation.evaluators.base import (
    EvaluatorFailed,
    call_contained,
    describe_refusal,
    missing_score,
    score_item,
)
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.reasons import ScoreFailures, find_missing_reason, find_unscored_reason
from reinforge.evaluation.statistics import summarize
from reinforge.interfaces import EvaluationRunner, Evaluator, GroupEvaluator
from reinforge.rollout.episode import with_steps
from reinforge.rollout.runner import EpisodeRunner, Score, score_alone
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import (
    MAX_SCORE,
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationReport,
    EvaluationRunOutput,
)
from reinforge.types.trajectory import Outcome

if TYPE_CHECKING:
    from reinforge.evaluation.opponents import Referee, SiblingGroups

REGRESSION = "regression"
HELD_OUT = ("select", "confirm", "transfer", REGRESSION)

Listener = Callable[[EpisodeRecord], None]
Recall = Callable[[EpisodeKey, EvalInputItem], EpisodeRecord | None]
ComputeReward = Callable[[EvalOutputItem, dict[str, Any]], Awaitable[float | None]]
EpochLoader = Callable[[int, Mapping[str, EvalInputItem], str], list[EpisodeRecord]]


class DatasetEvaluation(EvaluationRunner):
    """Runs the workflow over the splits of one dataset with the components of one run.

    Args:
        held_out_evaluators: Evaluators for `select` and `confirm`, including `reward_metric`; None: the same ones.
        clusters: Example id -> its cluster (`find_clusters`), of examples that share one; intervals count clusters.
        compute_reward: The trajectory builder's method that turns the reward metric's score of a collected episode into
            its reward, given `epoch` and `round`. None: the score is the reward.
        listener: Called once for every finished episode (journal, progress).
        num_samples: Episodes per example, by split; default 1.
        recall: Returns an episode that finished before the run was interrupted, or None.
        load_episodes: Returns the recorded episodes of an epoch and a phase, given all examples by id.
        note: Shows a line to the user: the first failures of each evaluator.
        includes: Whether a training example takes part now, by its id; None: all do.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        splits: Mapping[str, Sequence[EvalInputItem]],
        evaluators: Mapping[str, Evaluator],
        *,
        reward_metric: str,
        outcomes: OutcomesConfig,
        compute_reward: ComputeReward | None = None,
        listener: Listener = lambda record: None,
        num_samples: Mapping[str, int] | None = None,
        held_out_evaluators: Mapping[str, Evaluator] | None = None,
        clusters: Mapping[str, str] | None = None,
        recall: Recall = lambda key, item: None,
        load_episodes: EpochLoader = lambda epoch, items, phase: [],
        note: Callable[[str], None] = lambda text: None,
        includes: Callable[[str], bool] | None = None,
    ):
        self.runner, self.evaluators, self.reward_metric = runner, dict(evaluators), reward_metric
        self.held_out_evaluators = self.evaluators if held_out_evaluators is None else dict(held_out_evaluators)
        self.outcomes, self.listener, self.num_samples = outcomes, listener, dict(num_samples or {})
        self.compute_reward, self.clusters = compute_reward, dict(clusters or {})
        self.recall, self.load_episodes = recall, load_episodes
        self.splits = {name: list(items) for name, items in splits.items()}
        self._items = {str(item.id): item for items in self.splits.values() for item in items}
        self._held_out = {str(item.id) for split in HELD_OUT for item in self.splits.get(split, [])}
        self._calls: dict[int, dict[str, ModelCall]] = {}
        self._includes = includes
        self._num_evals: Counter[int] = Counter()
        self._failures = ScoreFailures(note)
        self._referee = self._make_referee()

    def example_ids(self, split: str) -> list[str]:
        ids = [str(item.id) for item in self.splits[split]]
        return ids if split in HELD_OUT or self._includes is None else list(filter(self._includes, ids))

    def examples(self, split: str) -> list[EvalInputItem]:
        return list(self.splits[split])

    async def collect(self, keys: Sequence[EpisodeKey]) -> list[EpisodeRecord]:
        """Returns these episodes, finished and scored, in the order of `keys`; those not found by `recall` are run."""
        episodes = [(key, self._items[key.example_id]) for key in keys]
        finished = {key: record for key, item in episodes if (record := self.recall(key, item)) is not None}
        remaining = [(key, item) for key, item in episodes if key not in finished]
        complete: Score = score_alone
        if self._referee is not None:
            complete = partial(self._compare, self._referee, self._referee.open_groups(keys, finished.values()))
        run = await self.runner.run(remaining, self._score, self.listener, complete)
        finished |= {record.key: record for record in run}
        records = [finished[key] for key in keys]
        if self._referee is not None:
            self._referee.base_answers.add(records)
        self._calls = {epoch: calls for epoch, calls in self._calls.items() if epoch >= self.epoch}
        for record in records:
            if record.key.phase == "collect":
                calls = self._calls.setdefault(record.key.epoch, {})
                calls |= {call.call_id: call for call in record.calls}
        return records

    def journalled_episodes(self, epoch: int) -> list[EpisodeRecord]:
        return self.load_episodes(epoch, self._items, "collect")

    def find_call(self, call_id: str) -> ModelCall | None:
        return next((calls[call_id] for calls in self._calls.values() if call_id in calls), None)

    def _get_evaluators(self, example_id: str) -> dict[str, Evaluator]:
        return self.held_out_evaluators if example_id in self._held_out else self.evaluators

    async def score_again(self, record: EpisodeRecord) -> EpisodeRecord:
        """Returns a copy of a finished episode whose answer has been scored once more, by every evaluator.

        Evaluators that compare answers have no score of one alone.
        """
        again = replace(record, scores={}, reward=None)
        await self._score_once(again)
        return again

    def _find_group_evaluators(self, record: EpisodeRecord) -> dict[str, GroupEvaluator]:
        evaluators = self._get_evaluators(record.key.example_id)
        return {name: each for name, each in evaluators.items() if isinstance(each, GroupEvaluator)}

    async def _score(self, record: EpisodeRecord) -> None:
        """Scores an episode; if an evaluator compares episodes, only with those that do not depend on it."""
        if not self._find_group_evaluators(record):
            await self._score_fully(record)
            return
        evaluators = self._get_evaluators(record.key.example_id)
        for name, evaluator in evaluators.items():
            if not isinstance(evaluator, GroupEvaluator | Weighted):
                await self._score_with(name, evaluators, record, record.scores)

    def _make_referee(self) -> Referee | None:
        """Returns what has episodes compared; None: no evaluator compares any."""
        evaluators = (*self.evaluators.values(), *self.held_out_evaluators.values())
        if not any(isinstance(each, GroupEvaluator) for each in evaluators):
            return None
        from reinforge.evaluation.opponents import BASELINE, BaseAnswers, Referee

        base_answers = BaseAnswers(lambda phase: self.load_episodes(BASELINE, self._items, phase))
        return Referee(base_answers, self._failures, self.outcomes.retries, self.runner.limits.evaluator_timeout_s)

    async def _compare(self, referee: Referee, groups: SiblingGroups, record: EpisodeRecord) -> None:
        evaluators = self._find_group_evaluators(record)
        if not evaluators:
            return
        if record.key.phase == "collect":
            await groups.join(record, partial(referee.compare_siblings, groups, evaluators))
        elif not record.outcome.is_missing:
            await referee.compare_with_reference(evaluators, record)
        if not record.outcome.is_missing:
            await self._score_fully(record)

    async def _score_fully(self, record: EpisodeRecord) -> None:
        for attempt in range(self.outcomes.retries + 1):
            await self._score_once(record)
            if not record.outcome.is_missing or attempt == self.outcomes.retries:
                return
            record.outcome, record.reason = Outcome.OK, None

    async def _score_once(self, record: EpisodeRecord) -> None:
        """Scores with every evaluator once; valid scores of an earlier attempt are kept."""
        known = {name: output for name, output in record.scores.items() if output.error is None}
        evaluators = self._get_evaluators(record.key.example_id)
        for name in evaluators:
            await self._score_with(name, evaluators, record, known)
        record.scores = {name: known[name] for name in evaluators}
        reward = record.scores[self.reward_metric]
        if reward.error is not None:
            is_function = getattr(self._get_evaluators(record.key.example_id)[self.reward_metric], "is_function", False)
            record.outcome = Outcome.REWARD_ERROR if is_function else Outcome.JUDGE_ERROR
            record.reason = reward.error
        else:
            await self._set_reward(record, reward)
        crash_point("reward.after")

    async def _set_reward(self, record: EpisodeRecord, score: EvalOutputItem) -> None:
        """Computes an episode's reward once, so that training uses the reward that the journal stores."""
        if self.compute_reward is None or record.key.phase != "collect":
            record.reward = score.as_reward()
            return
        compute_reward, meta = self.compute_reward, {"epoch": record.key.epoch, "round": record.key.round}

        async def compute() -> float | None:
            reward = await compute_reward(score, meta)
            return None if reward is None else float(reward)

        try:
            record.reward = await call_contained(compute, None)
            if record.reward is not None and MAX_SCORE < abs(record.reward) < math.inf:
                why = f"compute_reward returned {describe_refusal(record.reward)}"
                record.outcome, record.reason, record.reward = Outcome.REWARD_ERROR, why, None
        except (EvaluatorFailed, UnusableOutputError) as error:
            record.outcome, record.reason = Outcome.REWARD_ERROR, f"compute_reward: {show(error)}"

    async def _score_with(
        self, name: str, evaluators: dict[str, Evaluator], record: EpisodeRecord, known: dict[str, EvalOutputItem]
    ) -> EvalOutputItem:
        """Returns one evaluator's score; a weighted evaluator combines the scores of its parts."""
        if name in known:
            return known[name]
        evaluator = evaluators[name]
        if record.outcome.is_policy_failure and name == self.reward_metric:
            known[name] = self._penalize(record)
        elif isinstance(evaluator, GroupEvaluator):
            known[name] = self._get_comparison(name, record)
        elif isinstance(evaluator, Weighted) and evaluator.weights.keys() <= evaluators.keys():
            parts = {part: await self._score_with(part, evaluators, record, known) for part in evaluator.weights}
            known[name] = evaluator.combine(record.item, parts)
        else:
            item = with_steps(record) if getattr(evaluator, "reads_steps", True) else record.item
            known[name] = await score_item(evaluator, item, self.runner.limits.evaluator_timeout_s)
            if record.outcome.is_policy_failure and known[name].error is not None:  # there may be no answer to score
                known[name] = self._penalize(record, getattr(evaluator, "failed_score", None))
            if (error := known[name].error) is not None:
                self._failures.report(name, record.key.example_id, error)
        return known[name]

    def _get_comparison(self, name: str, record: EpisodeRecord) -> EvalOutputItem:
        """Returns the score that a comparison gave an episode; failures of the policy are not compared."""
        if name in record.scores:
            return record.scores[name]
        if record.outcome.is_policy_failure:
            return self._penalize(record)
        return missing_score(record.item, "it compares answers, and this one was scored alone")

    def _penalize(self, record: EpisodeRecord, penalty: float | None = None) -> EvalOutputItem:
        """Returns a penalty, else the configured reward of the policy's failure, so that no figure leaves it out."""
        if penalty is None:
            penalty = getattr(self.outcomes, record.outcome.value)
        return EvalOutputItem(id=record.item.id, score=penalty, reasoning=f"{record.outcome}: {record.reason}")

    async def validate(self, split: str, epoch: int, phase: str = "validate") -> EvaluationReport:
        """Runs every example of a split and summarizes the scores; environment failures are missing, never 0."""
        ids, num_samples = self.example_ids(split), self.num_samples.get(split, 1)
        keys = [EpisodeKey(phase, epoch, example, sample) for example in ids for sample in range(num_samples)]
        return self.report(split, epoch, await self.collect(keys))

    def report(self, split: str, epoch: int, records: Sequence[EpisodeRecord]) -> EvaluationReport:
        """Summarizes finished episodes: the mean over each example's samples, then over examples."""
        evaluators = self.held_out_evaluators if split in HELD_OUT else self.evaluators
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in evaluators}
        for record in records:
            for name, output in record.scores.items():
                if output.error is None and not record.outcome.is_missing:
                    samples[name].setdefault(record.key.example_id, []).append(float(output.score))
        scores = {name: {id_: statistics.fmean(v) for id_, v in by_id.items()} for name, by_id in samples.items()}
        num_examples = len({record.key.example_id for record in records})
        summaries = {
            name: summarize(name, by_id, num_examples, find_unscored_reason(records, name), self.clusters)
            for name, by_id in scores.items()
        }
        error = None if scores[self.reward_metric] else describe_missing(records)
        return EvaluationReport(
            split=split,
            epoch=epoch,
            scores=scores,
            num_examples=num_examples,
            outcomes=count_outcomes(records),
            reward_metric=self.reward_metric,
            error=error,
            summaries=summaries,
            clusters=self.clusters,
        )

    async def run_eval(self) -> EvaluationRunOutput:
        """Runs one generation over the training examples; a missing score has the reason in `error`."""
        generation = self._num_evals[self.epoch]
        self._num_evals[self.epoch] += 1
        keys = [EpisodeKey("collect", self.epoch, example, generation) for example in self.example_ids("train")]
        return build_output(await self.collect(keys), self.evaluators)


def build_output(records: Sequence[EpisodeRecord], evaluators: Iterable[str]) -> EvaluationRunOutput:
    """Returns finished episodes with their steps, and their scores by evaluator."""
    return EvaluationRunOutput(
        workflow_output_file=None,
        evaluator_output_files=[],
        workflow_interrupted=False,
        eval_input=EvalInput(eval_input_items=[with_steps(record) for record in records]),
        evaluation_results=[(name, _list_scores(name, records)) for name in evaluators],
        usage_stats={
            "prompt_tokens": sum(record.num_prompt_tokens for record in records),
            "completion_tokens": sum(record.num_completion_tokens for record in records),
        },
    )


def _list_scores(name: str, records: Sequence[EpisodeRecord]) -> EvalOutput:
    items = [
        record.scores.get(name)
        or EvalOutputItem(id=record.item.id, score=None, reasoning=None, error=f"{record.outcome}: {record.reason}")
        for record in records
    ]
    known = [float(item.score) for item in items if item.error is None]
    return EvalOutput(average_score=statistics.fmean(known) if known else None, eval_output_items=items)


def count_outcomes(records: Sequence[EpisodeRecord]) -> dict[str, int]:
    return dict(Counter(record.outcome.value for record in records))


def describe_missing(records: Sequence[EpisodeRecord]) -> str:
    reason = find_missing_reason(records)
    if reason is None:
        return "no episodes were run"
    missing = sum(record.outcome.is_missing for record in records)
    return f"{missing} of {len(records)} episodes have no score because of {reason}"


def choose_error_type(outcomes: Mapping[str, int]) -> type[ReinforgeError]:
    """Returns the error type for too many missing scores: BackendUnavailable if the backend caused most of them.

    Example: {"backend_error": 3, "tool_error": 2, "ok": 9} -> BackendUnavailable; {"tool_error": 1} -> EvaluationError.
    """
    missing = sum(count for name, count in outcomes.items() if Outcome(name).is_missing)
    return BackendUnavailable if outcomes.get(Outcome.BACKEND_ERROR, 0) > missing / 2 else EvaluationError


def check_missing_share(records: Sequence[EpisodeRecord], allowed: float, what: str) -> None:
    """Raises the error of `choose_error_type` if more than the `allowed` share of the episodes has no score."""
    missing = sum(record.outcome.is_missing for record in records)
    if records and missing > allowed * len(records):
        reason = find_missing_reason(records) or ""
        message = describe_too_many(what, f"{missing} of {len(records)} episodes", allowed, reason)
        raise choose_error_type(count_outcomes(records))(message)


def describe_too_many(what: str, unscored: str, allowed: float, reason: str) -> str:
    """Returns the message for a share of missing scores that `outcomes.max_missing` does not allow."""
    because = f"; the most common reason: {reason}" if reason else ""
    return f"{what}: {unscored} have no score, more than outcomes.max_missing ({allowed:.0%}) allows{because}"
