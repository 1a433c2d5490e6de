"""An evaluator that fails says so at its first failure, not at the end of the stage."""

import asyncio

from reinforge.evaluation import reasons
from reinforge.evaluation.evaluators.python import PythonEvaluator
from reinforge.evaluation.reasons import ReasonCounts, ScoreFailures, find_commonest_reason, find_unscored_reason
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.workflow import PolicyFailure
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.trajectory import Outcome
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


def test_reasons_that_differ_in_numbers_count_as_one():
    assert find_commonest_reason(["timeout", "no row 3", "no row 18"]) == "no row 3 (2 of 3)"
    assert find_commonest_reason(["no row 3", "no row 18"]) == "no row 3"
    assert find_commonest_reason([]) is None


def test_a_reason_is_one_short_line_without_control_codes():
    text = find_commonest_reason(["Error:\n\x1b[31mred " + "x" * 1000])
    assert text.startswith("Error: \\x1b[31mred xxx")
    assert len(text) == reasons.MAX_REASON_CHARACTERS
    assert text.endswith("...")


def test_counts_come_back_and_stay_bounded():
    """An agent may fail with a new text in each of a million episodes."""
    counts = ReasonCounts()
    for number in range(500):
        counts.add("no row " + "x" * (number % 200))
    assert len(counts.as_dict()) == reasons.MAX_KINDS + 1
    assert sum(counts.as_dict().values()) == 500
    assert ReasonCounts(counts.as_dict()).find_commonest() == counts.find_commonest()


def test_an_unscored_example_is_explained_by_its_episode_or_by_its_evaluator():
    def record(outcome, reason, **scores):
        item = EvalInputItem(id="1", input_obj="q", expected_output_obj="a", full_dataset_entry={})
        made = EpisodeRecord(EpisodeKey("validate", 0, "1", 0), item, seed=0, outcome=outcome, reason=reason)
        made.scores = {
            name: EvalOutputItem(id="1", score=None, reasoning=None, error=error) if error else
            EvalOutputItem(id="1", score=1.0, reasoning=None)
            for name, error in scores.items()
        }  # fmt: skip
        return made

    broken = record(Outcome.TOOL_ERROR, "AttributeError")
    half = record(Outcome.OK, None, wins=None, judge="the judge is silent")
    assert find_unscored_reason([broken, half], "wins") == "tool_error: AttributeError"
    assert find_unscored_reason([half], "judge") == "the judge is silent"
    assert find_unscored_reason([half], "wins") is None
