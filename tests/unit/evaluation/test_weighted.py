"""Several evaluators as one reward: the sum, what is missing, and each part scored once a run."""

from __future__ import annotations

from typing import Any

import pytest

from reinforge.config.loader import build_config
from reinforge.config.schema import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import ConfigError, EvaluationError
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.trainer.setup.components import Builder
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from tests.doubles import PolicyModel, Scored, ScriptedPolicy, examples


class Counting(Scored):
    """Scores, and counts how often it was asked."""

    def __init__(self, *scores: Any):
        super().__init__(None)
        self.scores, self.num_asked = list(scores), 0

    async def evaluate(self, item: Any) -> Any:
        score = self.scores[min(self.num_asked, len(self.scores) - 1)]
        self.num_asked += 1
        if isinstance(score, Exception):
            raise score
        return score


async def test_the_sum_of_weight_times_score() -> None:
    whole = Weighted({"correct": Counting(1.0), "long": Counting(0.5)}, {"correct": 0.8, "long": -0.2})
    found = await whole.evaluate(examples(1)[0])
    assert found.score == pytest.approx(0.7)
    assert found.reasoning == {
        "correct": {"score": 1.0, "weight": 0.8, "reasoning": None},
        "long": {"score": 0.5, "weight": -0.2, "reasoning": None},
    }


async def test_a_missing_part_makes_the_whole_missing() -> None:
    whole = Weighted({"a": Counting(1.0), "b": Counting(EvaluationError("down"))}, {"a": 1, "b": 1})
    found = await whole.evaluate(examples(1)[0])
    assert (found.score, found.error) == (None, "a part is missing: b: EvaluationError: down")
    assert found.reasoning["a"]["score"] == 1.0


async def run(evaluators: dict[str, Any], reward: str, *, failing: bool = False) -> EpisodeRecord:
    async def agent(item: Any, llm: Any, context: Any) -> str:
        if failing:
            raise PolicyFailure("no answer")
        return "yes"

    outcomes = OutcomesConfig(retries=1, policy_error=-1.0)
    runner = EpisodeRunner(
        bind_workflow(agent),
        {"agent": PolicyModel(ScriptedPolicy())},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=outcomes,
        run_seed=0,
        max_concurrency=1,
    )
    splits = {"train": examples(1)}
    evaluation = DatasetEvaluation(runner, splits, evaluators, reward_metric=reward, outcomes=outcomes)
    (record,) = await evaluation.collect([EpisodeKey("collect", 0, "0")])
    return record


async def test_a_run_scores_each_part_once_and_keeps_it_in_the_record() -> None:
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
    assert (record.reward, a.num_asked, b.num_asked) == (2.5, 1, 1)


async def test_only_what_is_missing_is_scored_again_and_the_episode_is_not_run_again() -> None:
    a, b = Counting(1.0), Counting(ValueError("busy"), 0.5)
    record = await run({"whole": Weighted({"a": a, "b": b}, {"a": 1, "b": 1}), "a": a, "b": b}, "whole")
    assert (record.reward, record.outcome, record.attempt) == (1.5, "ok", 0)
    assert (a.num_asked, b.num_asked) == (1, 2)
    b = Counting(EvaluationError("down"))
    record = await run({"whole": Weighted({"a": a, "b": b}, {"a": 1, "b": 1}), "a": a, "b": b}, "whole")
    assert (record.reward, record.outcome, record.attempt, b.num_asked) == (None, "judge_error", 0, 2)
    assert record.reason == "a part is missing: b: EvaluationError: down"


async def test_the_policys_own_failure_is_worth_its_penalty() -> None:
    record = await run({"whole": Weighted({"a": Counting(1.0)}, {"a": 1}), "a": Counting(1.0)}, "whole", failing=True)
    assert (record.reward, record.scores["a"].score) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"exac": 1}, 'weights.exac: eval.evaluators has no entry "exac", did you mean "exact"?'),
        ({"whole": 1}, "eval.evaluators.whole.weights: whole -> whole goes in a circle"),
        ({"other": 1}, "whole -> other -> whole goes in a circle"),
    ],
)
async def test_parts_that_cannot_be_are_refused(weights: dict[str, float], said: str) -> None:
    evaluators = {
        "exact": {"_type": "exact_match"},
        "whole": {"_type": "weighted", "weights": weights},
        "other": {"_type": "weighted", "weights": {"whole": 1}},
    }
    loaded = build_config({"eval": {"evaluators": evaluators}})
    async with Builder(loaded) as builder:
        with pytest.raises(ConfigError) as caught:
            await builder.get_evaluator("whole")
    assert said in str(caught.value)


async def test_parts_are_entries_of_the_configuration() -> None:
    evaluators = {"whole": {"_type": "weighted", "weights": {"exact": 2}}, "exact": {"_type": "exact_match"}}
    async with Builder(build_config({"eval": {"evaluators": evaluators}})) as builder:
        whole = await builder.get_evaluator("whole")
        assert (await whole.evaluate(examples(1)[0].copy_with_updates(output_obj="yes"))).score == 2.0
        assert whole.parts["exact"] is await builder.get_evaluator("exact")
