"""A weighted sum of evaluators: the sum, missing parts, and that each part is scored once."""

import pytest

from reinforge.config.loader import build_config
from reinforge.errors import ConfigError, EvaluationError
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey
from tests.doubles import Scored, examples
from tests.episodes import make_runner


class Counting(Scored):
    def __init__(self, *scores):
        super().__init__(None)
        self.scores, self.num_calls = list(scores), 0

    async def evaluate(self, item):
        score = self.scores[min(self.num_calls, len(self.scores) - 1)]
        self.num_calls += 1
        if isinstance(score, Exception):
            raise score
        return score


async def test_the_sum_of_weight_times_score():
    whole = Weighted({"correct": Counting(1.0), "long": Counting(0.5)}, {"correct": 0.8, "long": -0.2})
    found = await whole.evaluate(examples(1)[0])
    assert found.score == pytest.approx(0.7)
    assert found.reasoning == {
        "correct": {"score": 1.0, "weight": 0.8, "reasoning": None},
        "long": {"score": 0.5, "weight": -0.2, "reasoning": None},
    }


@pytest.mark.parametrize(
    ("scores", "weights", "total", "error"),
    [
        ((9e8, 9e8), (0.5, 0.5), 9e8, None),
        ((9e8, -9e8), (1, 1), 0.0, None),
        ((9e8, 9e8), (1, 1), None, "the weighted sum is 1800000000.0, beyond the largest score of 1e+09; divide the"),
        ((1.0, 1.0), (1e308, 1e308), None, "the weighted sum is inf, not a finite number"),
        ((1e9, -1e9), (1e300, 1e300), None, "the weighted sum is nan, not a finite number"),
    ],
)
async def test_a_sum_that_is_too_large_is_missing(scores, weights, total, error):
    parts = {"a": Counting(scores[0]), "b": Counting(scores[1])}
    found = await Weighted(parts, dict(zip("ab", weights, strict=True))).evaluate(examples(1)[0])
    assert found.score == total
    assert str(found.error).startswith(str(error))


async def run(evaluators, reward):
    async def agent(item, llm, context):
        return "yes"

    runner = make_runner(agent, seed=0, concurrency=1, retries=1)
    splits = {"train": examples(1)}
    evaluation = DatasetEvaluation(runner, splits, evaluators, reward_metric=reward, outcomes=runner.outcomes)
    (record,) = await evaluation.collect([EpisodeKey("collect", 0, "0")])
    return record


async def test_a_run_scores_each_part_once_and_records_its_score():
    a, b = Counting(1.0), Counting(0.5)
    inner = Weighted({"a": a}, {"a": 2.0})
    parts = {"whole": Weighted({"inner": inner, "b": b}, {"inner": 1, "b": 1}), "a": a, "b": b, "inner": inner}
    record = await run(parts, "whole")
    assert {name: output.score for name, output in record.scores.items()} == {
        "whole": 2.5,
        "a": 1.0,
        "b": 0.5,
        "inner": 2.0,
    }
    assert (record.reward, a.num_calls, b.num_calls) == (2.5, 1, 1)


async def test_only_missing_scores_are_retried_and_not_the_episode():
    a, b = Counting(1.0), Counting(ValueError("busy"), 0.5)
    record = await run({"whole": Weighted({"a": a, "b": b}, {"a": 1, "b": 1}), "a": a, "b": b}, "whole")
    assert (record.reward, record.outcome, record.attempt) == (1.5, "ok", 0)
    assert (a.num_calls, b.num_calls) == (1, 2)
    b = Counting(EvaluationError("down"))
    record = await run({"whole": Weighted({"a": a, "b": b}, {"a": 1, "b": 1}), "a": a, "b": b}, "whole")
    assert (record.reward, record.outcome, record.attempt, b.num_calls) == (None, "judge_error", 0, 2)
    assert record.reason == "no score for b: EvaluationError: down"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"exac": 1}, 'weights.exac: eval.evaluators has no entry "exac", did you mean "exact"?'),
        ({"whole": 1}, "eval.evaluators.whole.weights: circular reference: whole -> whole"),
        ({"other": 1}, "circular reference: whole -> other -> whole"),
    ],
)
async def test_invalid_parts_are_rejected(weights, message):
    evaluators = {
        "exact": {"_type": "exact_match"},
        "whole": {"_type": "weighted", "weights": weights},
        "other": {"_type": "weighted", "weights": {"whole": 1}},
    }
    loaded = build_config({"eval": {"evaluators": evaluators}})
    async with ComponentBuilder(loaded) as builder:
        with pytest.raises(ConfigError) as caught:
            await builder.get_evaluator("whole")
    assert message in str(caught.value)


async def test_parts_are_entries_of_the_configuration():
    evaluators = {"whole": {"_type": "weighted", "weights": {"exact": 2}}, "exact": {"_type": "exact_match"}}
    async with ComponentBuilder(build_config({"eval": {"evaluators": evaluators}})) as builder:
        whole = await builder.get_evaluator("whole")
        assert (await whole.evaluate(examples(1)[0].copy_with_updates(output_obj="yes"))).score == 2.0
        assert whole.parts["exact"] is await builder.get_evaluator("exact")
