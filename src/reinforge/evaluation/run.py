"""Dataset x workflow -> finished, scored episodes; one concurrency limit for all of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from reinforge.config.schema import OutcomesConfig
from reinforge.crash import crash_point
from reinforge.errors import BackendUnavailable, EvaluationError, ReinforgeError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.statistics import summarize
from reinforge.interfaces import EvaluationReport, EvaluationRunner, Evaluator
from reinforge.rollout.episode import steps_of
from reinforge.rollout.runner import EpisodeRunner
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from reinforge.types.trajectory import Outcome

HELD_OUT = ("select", "confirm")

Listener = Callable[[EpisodeRecord], None]
Recall = Callable[[EpisodeKey, EvalInputItem], EpisodeRecord | None]
Recorded = Callable[[int, Mapping[str, EvalInputItem]], list[EpisodeRecord]]


class DatasetEvaluation(EvaluationRunner):
    """Runs the workflow over the splits of one dataset with the components of one run.

    Args:
        runner: Runs the episodes.
        splits: Examples by split: `train`, `select`, `confirm`.
        evaluators: Evaluators by name.
        held_out_evaluators: Those of `select` and `confirm`, where they are others; they hold the reward's name too.
        reward_metric: The evaluator whose score is the reward.
        outcomes: Penalties of the policy's own failures.
        listener: Called once for every finished episode (journal, progress).
        draws: Episodes per example, by split; 1 where absent.
        recall: Returns an episode that was run and scored before the run was stopped, or None.
        journalled: Returns the collected episodes of an epoch, given every example by its id.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        splits: Mapping[str, Sequence[EvalInputItem]],
        evaluators: Mapping[str, Evaluator],
        *,
        reward_metric: str,
        outcomes: OutcomesConfig,
        listener: Listener = lambda record: None,
        draws: Mapping[str, int] | None = None,
        held_out_evaluators: Mapping[str, Evaluator] | None = None,
        recall: Recall = lambda key, item: None,
        journalled: Recorded = lambda epoch, items: [],
    ):
        self.runner, self.evaluators, self.reward_metric = runner, dict(evaluators), reward_metric
        self.held_out_evaluators = self.evaluators if held_out_evaluators is None else dict(held_out_evaluators)
        self.outcomes, self.listener, self.draws = outcomes, listener, dict(draws or {})
        self.recall, self.journalled = recall, journalled
        self.splits = {name: list(items) for name, items in splits.items()}
        self._items = {str(item.id): item for items in self.splits.values() for item in items}
        self._held_out = {str(item.id) for split in HELD_OUT for item in self.splits.get(split, [])}
        self._calls: dict[str, ModelCall] = {}
        self._calls_epoch = self.epoch
        self._num_evals: Counter[int] = Counter()

    def example_ids(self, split: str) -> list[str]:
        """Returns the ids of a split's examples."""
        return [str(item.id) for item in self.splits[split]]

    def examples(self, split: str) -> list[EvalInputItem]:
        """Returns a split's examples."""
        return list(self.splits[split])

    async def collect(self, keys: Sequence[EpisodeKey]) -> list[EpisodeRecord]:
        """Returns these episodes finished and scored, in the order of `keys`: recalled or, where they are not, run."""
        asked = [(key, self._items[key.example_id]) for key in keys]
        found = {key: record for key, item in asked if (record := self.recall(key, item)) is not None}
        missing = [(key, item) for key, item in asked if key not in found]
        found |= {record.key: record for record in await self.runner.run(missing, self._score, self.listener)}
        records = [found[key] for key in keys]
        if self._calls_epoch != self.epoch:
            self._calls, self._calls_epoch = {}, self.epoch
        collected = [record for record in records if record.key.phase == "collect"]
        self._calls |= {call.call_id: call for record in collected for call in record.calls}
        return records

    def recorded(self, epoch: int) -> list[EpisodeRecord]:
        """Returns the collected episodes of an epoch that is over, in the order of their keys."""
        return self.journalled(epoch, self._items)

    def captured(self, call_id: str) -> ModelCall | None:
        """Returns a model call of this epoch's episodes, or None where there was none of that id."""
        return self._calls.get(call_id)

    def _evaluators_of(self, example_id: str) -> dict[str, Evaluator]:
        return self.held_out_evaluators if example_id in self._held_out else self.evaluators

    async def _score(self, record: EpisodeRecord) -> None:
        for attempt in range(self.outcomes.retries + 1):
            await self._score_once(record)
            if record.outcome is not Outcome.JUDGE_ERROR or attempt == self.outcomes.retries:
                return
            record.outcome, record.reason = Outcome.OK, None

    async def _score_once(self, record: EpisodeRecord) -> None:
        """Scores by every evaluator, each once; scores that an earlier attempt gave are kept."""
        known = {name: output for name, output in record.scores.items() if output.error is None}
        evaluators = self._evaluators_of(record.key.example_id)
        for name in evaluators:
            await self._score_by(name, evaluators, record, known)
        record.scores = {name: known[name] for name in evaluators}
        reward = record.scores[self.reward_metric]
        if reward.error is not None:
            record.outcome, record.reason = Outcome.JUDGE_ERROR, reward.error
        else:
            record.reward = float(reward.score)
        crash_point("reward.after")

    async def _score_by(
        self, name: str, evaluators: dict[str, Evaluator], record: EpisodeRecord, known: dict[str, EvalOutputItem]
    ) -> EvalOutputItem:
        """Returns one evaluator's score; a weighted one is made of the scores of its parts."""
        if name in known:
            return known[name]
        evaluator = evaluators[name]
        if record.outcome.is_policy_failure and name == self.reward_metric:
            penalty = getattr(self.outcomes, record.outcome.value)
            reason = f"{record.outcome}: {record.reason}"
            known[name] = EvalOutputItem(id=record.item.id, score=penalty, reasoning=reason)
        elif isinstance(evaluator, Weighted) and evaluator.weights.keys() <= evaluators.keys():
            parts = {part: await self._score_by(part, evaluators, record, known) for part in evaluator.weights}
            known[name] = evaluator.combine(record.item, parts)
        else:
            known[name] = await score_item(evaluator, record.item, self.runner.limits.evaluator_timeout_s)
        return known[name]

    async def validate(self, split: str, epoch: int, phase: str = "validate") -> EvaluationReport:
        """Runs every example of a split and summarises the scores; the world's failures are missing, never 0."""
        ids, draws = self.example_ids(split), self.draws.get(split, 1)
        keys = [EpisodeKey(phase, epoch, example, draw) for example in ids for draw in range(draws)]
        return self.report(split, epoch, await self.collect(keys))

    def report(self, split: str, epoch: int, records: Sequence[EpisodeRecord]) -> EvaluationReport:
        """Returns the figures of finished episodes: mean over an example's draws, then over examples."""
        evaluators = self.held_out_evaluators if split in HELD_OUT else self.evaluators
        drawn: dict[str, dict[str, list[float]]] = {name: {} for name in evaluators}
        for record in records:
            for name, output in record.scores.items():
                if output.error is None and not record.outcome.is_missing:
                    drawn[name].setdefault(record.key.example_id, []).append(float(output.score))
        scores = {name: {id_: statistics.fmean(v) for id_, v in found.items()} for name, found in drawn.items()}
        num_examples = len({record.key.example_id for record in records})
        summaries = {name: summarize(name, found, num_examples) for name, found in scores.items()}
        error = None if scores[self.reward_metric] else why_missing(records)
        return EvaluationReport(
            split=split,
            epoch=epoch,
            scores=scores,
            num_examples=num_examples,
            outcomes=count_outcomes(records),
            reward_metric=self.reward_metric,
            error=error,
            summaries=summaries,
        )

    async def run_eval(self) -> EvaluationRunOutput:
        """Runs one generation over the training examples, with outputs, steps and scores.

        Missing scores have `score=None` and say why in `error`.
        """
        generation = self._num_evals[self.epoch]
        self._num_evals[self.epoch] += 1
        keys = [EpisodeKey("collect", self.epoch, example, generation) for example in self.example_ids("train")]
        records = await self.collect(keys)
        items = [record.item.copy_with_updates(trajectory=steps_of(record)) for record in records]
        return EvaluationRunOutput(
            workflow_output_file=None,
            evaluator_output_files=[],
            workflow_interrupted=False,
            eval_input=EvalInput(eval_input_items=items),
            evaluation_results=[(name, self._output(name, records)) for name in self.evaluators],
            usage_stats={
                "prompt_tokens": sum(record.num_prompt_tokens for record in records),
                "completion_tokens": sum(record.num_completion_tokens for record in records),
            },
        )

    def _output(self, name: str, records: Sequence[EpisodeRecord]) -> EvalOutput:
        items = [
            record.scores.get(name)
            or EvalOutputItem(id=record.item.id, score=None, reasoning=None, error=f"{record.outcome}: {record.reason}")
            for record in records
        ]
        known = [float(item.score) for item in items if item.error is None]
        return EvalOutput(average_score=statistics.fmean(known) if known else None, eval_output_items=items)


def count_outcomes(records: Sequence[EpisodeRecord]) -> dict[str, int]:
    """Returns how many episodes ended in each way; the counts add up to the number of episodes."""
    return dict(Counter(record.outcome.value for record in records))


def why_missing(records: Sequence[EpisodeRecord]) -> str:
    """Returns the commonest reason among episodes that the world failed, with its count."""
    reasons = Counter(f"{r.outcome}: {r.reason}" for r in records if r.outcome.is_missing)
    if not reasons:
        return "no episodes were run"
    reason, count = reasons.most_common(1)[0]
    return f"{count} of {len(records)} episodes are missing because of {reason}"


def error_of(outcomes: Mapping[str, int]) -> type[ReinforgeError]:
    """Returns what is raised where too much is missing: the environment's error if most of it is the backend's fault.

    Example: {"backend_error": 3, "tool_error": 2, "ok": 9} -> BackendUnavailable; {"tool_error": 1} -> EvaluationError.
    """
    missing = sum(count for name, count in outcomes.items() if Outcome(name).is_missing)
    return BackendUnavailable if outcomes.get(Outcome.BACKEND_ERROR, 0) > missing / 2 else EvaluationError


def refuse_too_many_missing(records: Sequence[EpisodeRecord], allowed: float, what: str) -> None:
    """Stops the run where the world failed too often for any figure to be trusted.

    Raises:
        BackendUnavailable: More than the `allowed` share is missing, mostly since a model did not answer.
        EvaluationError: So many are missing for other reasons.
    """
    missing = sum(record.outcome.is_missing for record in records)
    if records and missing > allowed * len(records):
        raise error_of(count_outcomes(records))(
            f"{what}: {missing} of {len(records)} episodes are missing, more than outcomes.max_missing "
            f"({allowed:.0%}) allows; {why_missing(records)}"
        )
