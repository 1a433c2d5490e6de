"""What an episode is compared with: siblings in training, the base model's answer on held-out examples."""

import asyncio
import re

import pytest

from reinforge.evaluation import opponents
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import GroupEvaluator
from reinforge.rollout.workflow import PolicyFailure
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.trajectory import Outcome
from tests.doubles import Scored, examples
from tests.episodes import make_runner


class Longest(GroupEvaluator):
    """Scores the share of the other answers that are shorter; raises the exceptions of its script first."""

    def __init__(self, *script, reference="base"):
        self.script, self.reference, self.groups = list(script), reference, []

    async def evaluate_group(self, items):
        self.groups.append([item.output_obj for item in items])
        if self.script:
            raise self.script.pop(0)
        lengths = [len(item.output_obj) for item in items]
        return [
            EvalOutputItem(
                id=item.id,
                score=(sum(length > other for other in lengths) + (lengths.count(length) - 1) / 2) / (len(items) - 1),
                reasoning=f"{len(item.trajectory)} steps",
            )
            for item, length in zip(items, lengths, strict=True)
        ]


class Bench:
    """An evaluation of a scripted agent: `answer(item, generation)` returns its output, or an exception to raise."""

    def __init__(self, answer, evaluators, *, reward="longest", concurrency=2, load=None, count=2):
        self.notes, self.finished, self.answer = [], [], answer

        async def agent(item, llm, context):
            await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
            found = self.answer(item, context)
            if isinstance(found, Exception):
                raise found
            return found

        runner = make_runner(agent, seed=0, concurrency=concurrency, retries=1, policy_error=-0.25)
        items = examples(3 * count)
        self.evaluation = DatasetEvaluation(
            runner,
            {"train": items[:count], "select": items[count : 2 * count], "confirm": items[2 * count :]},
            evaluators,
            reward_metric=reward,
            outcomes=runner.outcomes,
            listener=self.finished.append,
            note=self.notes.append,
            num_samples={"confirm": 2},
            **({"load_episodes": load} if load else {}),
        )

    async def collect(self, generations=4, ids=("0",)):
        keys = [EpisodeKey("collect", 0, id_, number) for id_ in ids for number in range(generations)]
        return await self.evaluation.collect(keys)


def in_turn(*answers):
    """Returns an agent that gives these answers one after the other, whoever asks."""
    left = list(answers)
    return lambda item, context: left.pop(0)


def rewards(records):
    return [record.reward for record in records]


async def test_siblings_are_compared_together_once_all_have_ended():
    judge = Longest()
    bench = Bench(in_turn("aa", "a", "aaaa", "aaa", "b", "bbb", "bb", "bbbb"), {"longest": judge}, concurrency=1)
    records = await bench.collect(ids=("0", "1"))
    assert [record.item.output_obj for record in records] == ["aa", "a", "aaaa", "aaa", "b", "bbb", "bb", "bbbb"]
    assert rewards(records) == pytest.approx([1 / 3, 0, 1, 2 / 3, 0, 2 / 3, 1 / 3, 1])
    assert judge.groups == [["aa", "a", "aaaa", "aaa"], ["b", "bbb", "bb", "bbbb"]], "one call for a group"
    assert {record.scores["longest"].reasoning for record in records} == {"2 steps"}, "the judge sees the calls"
    assert len(bench.finished) == 8


async def test_a_group_larger_than_the_concurrency_limit_does_not_wait_for_itself():
    """An episode that waits for its siblings no longer counts as in flight."""
    bench = Bench(in_turn(*"abcdefgh"), {"longest": Longest()}, concurrency=1)
    async with asyncio.timeout(10):
        assert rewards(await bench.collect(8)) == [0.5] * 8


async def test_other_evaluators_of_the_same_episode_are_scored_once_before_the_siblings_have_ended():
    calls = []
    plain = Scored(lambda item: calls.append(item.output_obj) or 1.0)
    evaluators = {"plain": plain, "longest": Longest(), "reward": Weighted({}, {"longest": 0.8, "plain": 0.2})}
    bench = Bench(in_turn("aa", "a"), evaluators, reward="reward", concurrency=1)
    assert rewards(await bench.collect(2)) == pytest.approx([1.0, 0.2])
    assert sorted(calls) == ["a", "aa"]


async def test_a_comparison_that_fails_is_repeated_and_then_leaves_all_siblings_missing():
    judge = Longest(ValueError("busy"))
    assert rewards(await Bench(in_turn("aa", "a"), {"longest": judge}, concurrency=1).collect(2)) == [1.0, 0.0]
    assert len(judge.groups) == 2
    judge = Longest(*[ValueError("down")] * 9)
    bench = Bench(in_turn("aa", "a"), {"longest": judge})
    records = await bench.collect(2)
    assert [(record.outcome, record.reward) for record in records] == [(Outcome.JUDGE_ERROR, None)] * 2, "never 0"
    assert len(judge.groups) == 2, "retries: 1"
    assert len(bench.notes) == 1
    assert re.match(
        r"evaluator longest has no score for example 0: ValueError: down \(test_opponents.py:\d+\)", bench.notes[0]
    )


async def test_failures_of_the_policy_and_of_the_environment_are_not_compared():
    judge = Longest()
    answers = {0: "a", 1: PolicyFailure("no answer"), 2: RuntimeError("no network"), 3: "aa"}
    numbers = iter(range(99))
    bench = Bench(lambda item, context: answers.get(next(numbers), RuntimeError("no network")), {"longest": judge})
    records = await bench.collect(4)
    outcomes = [record.outcome for record in records]
    assert sorted(outcomes) == sorted([Outcome.OK, Outcome.OK, Outcome.POLICY_ERROR, Outcome.TOOL_ERROR])
    by_output = {record.item.output_obj: record.reward for record in records if record.outcome is Outcome.OK}
    assert by_output == {"a": 0.0, "aa": 1.0}
    assert [record.reward for record in records if record.outcome is Outcome.POLICY_ERROR] == [-0.25]
    assert [record.reward for record in records if record.outcome is Outcome.TOOL_ERROR] == [None]
    assert [sorted(group) for group in judge.groups] == [["a", "aa"]]


async def test_an_answer_alone_among_failures_is_neither_better_nor_worse():
    judge = Longest()
    bench = Bench(in_turn("a", PolicyFailure("x"), PolicyFailure("y")), {"longest": judge}, concurrency=1)
    records = await bench.collect(3)
    assert rewards(records) == [0.5, -0.25, -0.25]
    assert records[0].scores["longest"].reasoning == "no sibling has an answer to compare with"
    assert judge.groups == []


async def test_an_episode_collected_alone_has_nothing_to_compare_with():
    bench = Bench(in_turn("a"), {"longest": Longest()})
    (record,) = await bench.collect(1)
    assert (record.outcome, record.reward) == (Outcome.JUDGE_ERROR, None)
    assert "each example has one episode only; collect several (num_generations)" in record.reason
    assert len(bench.notes) == 1
    (record,) = await Bench(in_turn("aaaa"), {"longest": Longest(reference="expected")}).collect(1)
    assert record.reward == 1.0, 'longer than the expected "yes"'


async def test_held_out_answers_are_compared_with_the_base_models_answer_to_the_same_example():
    judge = Longest()
    bench = Bench(lambda item, context: "a" * int(item.id), {"longest": judge})
    base = await bench.evaluation.validate("select", -1)
    assert base.scores["longest"] == {"2": 0.5, "3": 0.5}
    assert judge.groups == [], "the base model's own answers need no judge"
    bench.answer = lambda item, context: {"2": "aaaa", "3": "a"}[item.id]
    tuned = await bench.evaluation.validate("select", 3)
    assert tuned.scores["longest"] == {"2": 1.0, "3": 0.0}
    assert sorted(judge.groups) == [["aa", "aaaa"], ["aaa", "a"]], "base first"


async def test_the_verdict_compares_with_the_base_models_fresh_episodes_sample_by_sample():
    judge = Longest()
    bench = Bench(in_turn(*["a", "aaa"] * 2), {"longest": judge}, concurrency=1)
    base = await bench.evaluation.validate("confirm", -1, "confirm_base")
    assert base.scores["longest"] == {"4": 0.5, "5": 0.5}
    bench.answer = in_turn(*["aa", "aa", "aaaa", "a"])
    tuned = await bench.evaluation.validate("confirm", 1, "confirm_tuned")
    assert tuned.scores["longest"] == {"4": 0.5, "5": 0.5}, "a win and a loss: (1 + 0) / 2 for both"
    assert sorted(judge.groups) == sorted([["a", "aa"], ["aaa", "aa"], ["a", "aaaa"], ["aaa", "a"]])


async def test_a_resumed_run_finds_the_base_models_answers_in_its_journal():
    first = Bench(lambda item, context: "aa", {"longest": Longest()})
    await first.evaluation.validate("select", -1)
    asked = []

    def load(epoch, items, phase):
        asked.append((epoch, phase))
        return first.finished

    bench = Bench(lambda item, context: "aaa", {"longest": Longest()}, load=load)
    assert (await bench.evaluation.validate("select", 5)).scores["longest"] == {"2": 1.0, "3": 1.0}
    assert asked == [(-1, "validate")], "read once"


async def test_where_the_base_model_failed_both_arms_have_the_same_expected_score():
    """Base and tuned fail on half of the examples each, at random: every pair of outcomes is equally likely."""
    ok, failed = "aa", PolicyFailure("x")
    differences = []
    for before in (ok, failed):
        for after in (ok, failed):
            bench = Bench(lambda item, context, answer=before: answer, {"longest": Longest()}, count=1)
            base = (await bench.evaluation.validate("select", -1)).scores["longest"]["1"]
            bench.answer = lambda item, context, answer=after: answer
            differences.append((await bench.evaluation.validate("select", 0)).scores["longest"]["1"] - base)
    assert differences == [0.0, -0.75, 0.75, 0.0], "a failure costs as much as its absence gains"


async def test_a_missing_base_answer_leaves_the_score_missing():
    bench = Bench(lambda item, context: RuntimeError("down"), {"longest": Longest()})
    await bench.evaluation.validate("select", -1)
    bench.answer = lambda item, context: "a"
    report = await bench.evaluation.validate("select", 0)
    assert report.scores["longest"] == {}
    assert "the base model has no answer to this example to compare with" in report.error


async def test_outside_a_run_there_is_no_base_model_to_compare_with():
    bench = Bench(lambda item, context: "a", {"longest": Longest()})
    (record,) = await bench.evaluation.collect([EpisodeKey("eval", 0, "2")])
    assert record.reward is None
    assert "set `reference: expected`" in record.reason
    bench = Bench(lambda item, context: "aaaa", {"longest": Longest(reference="expected")})
    (record,) = await bench.evaluation.collect([EpisodeKey("eval", 0, "2")])
    assert record.reward == 1.0


async def test_a_sibling_of_before_an_interruption_is_compared_and_keeps_its_score():
    first = Bench(in_turn("a", "aa"), {"longest": Longest()}, concurrency=1)
    known = await first.collect(2)
    judge = Longest()
    second = Bench(in_turn("aaa", "aaaa"), {"longest": judge}, concurrency=1)
    second.evaluation.recall = lambda key, item: known[key.generation] if key.generation < 2 else None
    records = await second.collect(4)
    assert judge.groups == [["a", "aa", "aaa", "aaaa"]]
    assert rewards(records) == pytest.approx([0, 1, 2 / 3, 1])
    assert {record.key.generation for record in second.finished} == {2, 3}, "what the journal has is not written again"


async def test_without_the_wait_for_siblings_a_group_is_never_compared_as_one(monkeypatch):
    """Mutation check: each episode that ends is compared with those that have ended before it."""

    async def compare_at_once(self, record, compare):
        self._records[opponents._group_of(record.key)].append(record)
        await compare(list(self._records[opponents._group_of(record.key)]))

    monkeypatch.setattr(opponents.SiblingGroups, "join", compare_at_once)
    judge = Longest()
    bench = Bench(in_turn("aaaa", "aaa", "aa", "a"), {"longest": judge}, concurrency=1)
    await bench.collect(4)
    assert len(judge.groups) > 1
