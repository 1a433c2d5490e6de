"""An evaluator that fails says so at its first failure, not at the end of the stage."""

import asyncio

from reinforge.evaluation import reasons
from reinforge.evaluation.evaluators.python import PythonEvaluator
from reinforge.evaluation.reasons import ScoreFailures
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.workflow import PolicyFailure
from reinforge.types.episode import EpisodeKey
from tests.doubles import Scored, examples
from tests.episodes import make_runner


def test_each_kind_of_failure_is_reported_once_and_at_most_three_kinds():
    notes = []
    failures = ScoreFailures(notes.append)
    for number in range(5):
        failures.report("correct", str(number), f"KeyError: 'answer' (task.py:12), row {number}")
    failures.report("correct", "7", "timed out after 5 s")
    failures.report("format", "7", "timed out after 5 s")
    failures.report("correct", "8", "returned None, not a finite number")
    failures.report("correct", "9", "something else")
    assert notes == [
        "evaluator correct has no score for example 0: KeyError: 'answer' (task.py:12), row 0; such scores are tried "
        "again, then missing, never 0",
        "evaluator correct has no score for example 7: timed out after 5 s",
        "evaluator format has no score for example 7: timed out after 5 s; such scores are tried again, then missing, "
        "never 0",
        "evaluator correct has no score for example 8: returned None, not a finite number",
    ]


def build(score, notes, *, agent=None, count=3):
    async def answer(item, llm, context):
        return "yes"

    runner = make_runner(agent or answer, seed=0, concurrency=count, retries=1)
    splits, evaluators = {"train": examples(count)}, {"reward": PythonEvaluator(score)}
    fields = {"reward_metric": "reward", "outcomes": runner.outcomes, "note": notes.append}
    return DatasetEvaluation(runner, splits, evaluators, **fields)


def collect(evaluation):
    return evaluation.collect([EpisodeKey("collect", 0, id_) for id_ in evaluation.example_ids("train")])


async def test_a_bug_is_reported_while_the_other_episodes_still_run():
    notes, said = [], asyncio.Event()

    async def waits(item, llm, context):
        if item.id != "0":
            await said.wait()  # this episode ends only after the first failure was reported
        return "yes"

    def buggy(output, expected):
        return {"yes": 1.0}[output + "!"]

    class Notes(list):
        def append(self, text):
            super().append(text)
            said.set()

    notes = Notes()
    async with asyncio.timeout(20):
        records = await collect(build(buggy, notes, agent=waits))
    line = buggy.__code__.co_firstlineno + 1
    assert notes == [
        f"evaluator reward has no score for example 0: KeyError: 'yes!' (test_score_failures.py:{line}); such scores "
        "are tried again, then missing, never 0"
    ]
    assert [record.reward for record in records] == [None] * 3


async def test_a_policy_failure_that_an_evaluator_cannot_score_is_not_reported():
    async def fails(item, llm, context):
        raise PolicyFailure("no answer")

    notes = []
    evaluation = build(lambda output, expected: 1.0, notes, agent=fails)
    evaluation.evaluators["length"] = Scored(lambda item: len(item.output_obj))
    records = await collect(evaluation)
    assert notes == []
    assert [record.scores["length"].score for record in records] == [0.0] * 3, "the penalty"


async def test_without_the_report_the_first_failure_passes_without_a_word(monkeypatch):
    """Mutation check: it is the report that tells."""
    monkeypatch.setattr(reasons, "MAX_REPORTED_KINDS", 0)
    notes = []
    await collect(build(lambda output, expected: 1 / 0, notes))
    assert notes == []
