"""An evaluator that fails leaves the score missing, with the reason, never 0, and never blocks the run."""

import asyncio
import json
import math
import threading
import time

import numpy as np
import pytest

from reinforge.config.schema import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.evaluation.evaluators.python import PythonEvaluator
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.trajectory import Outcome
from tests.doubles import PolicyModel, ScriptedPolicy, examples
from tests.scripted_run import ScriptedRun, ask, by_answer

TIMEOUT_S = 0.1
BROKEN = "1"
"""The example that every evaluator here fails on; the others score 1."""


def raises(item):
    raise ValueError("no such column")


def exits(item):
    raise SystemExit(2)


async def exits_later(item):
    raise SystemExit(2)


async def cancels_itself(item):
    raise asyncio.CancelledError


def hangs(item):
    time.sleep(2)
    return 1.0


async def hangs_politely(item):
    await asyncio.sleep(60)
    return 1.0


async def times_out_by_itself(item):
    raise TimeoutError("its own database")


def returns(value):
    return lambda item: value


FAILURES = [
    (raises, "ValueError: no such column"),
    (exits, "SystemExit(2)"),
    (exits_later, "SystemExit: 2"),
    (cancels_itself, "the evaluator raised CancelledError"),
    (hangs, "timed out after 0.1 s"),
    (hangs_politely, "timed out after 0.1 s"),
    (times_out_by_itself, "TimeoutError: its own database"),
    (returns(None), "returned None"),
    (returns(math.nan), "returned nan"),
    (returns(math.inf), "returned inf"),
    (returns(-math.inf), "returned -inf"),
    (returns(np.float32("nan")), "returned nan"),
    (returns(10**400), "not a finite number"),
    (returns("0.5"), 'returned "0.5"'),
    (returns([1.0]), "returned list"),
    (returns({"score": 1.0}), "returned dict"),
    (returns(1j), "returned complex"),
    (returns(EvalOutputItem(id="1", score=None, reasoning=None)), "returned None"),
    (returns(EvalOutputItem(id="1", score=0.0, reasoning=None, error="the judge is down")), "the judge is down"),
]
NAMES = [f"{function.__name__}: {why}" for function, why in FAILURES]


def failing(function):
    """Returns an evaluator that fails on one example."""
    if asyncio.iscoroutinefunction(function):

        async def score(item):
            return await function(item) if item.id == BROKEN else 1.0
    else:

        def score(item):
            return function(item) if item.id == BROKEN else 1.0

    return PythonEvaluator(score)


def evaluation_of(evaluators, retries=0):
    runner = EpisodeRunner(
        bind_workflow(ask),
        {"agent": PolicyModel(ScriptedPolicy())},
        sampling=SamplingConfig(),
        limits=LimitsConfig(evaluator_timeout_s=TIMEOUT_S),
        outcomes=OutcomesConfig(retries=retries),
        run_seed=1,
        max_concurrency=8,
    )
    splits = {"train": examples(4), "select": []}
    return DatasetEvaluation(runner, splits, evaluators, reward_metric="reward", outcomes=runner.outcomes)


async def records_of(evaluation):
    return await evaluation.collect([EpisodeKey("collect", 0, id_) for id_ in evaluation.example_ids("train")])


@pytest.mark.parametrize(("function", "why"), FAILURES, ids=NAMES)
async def test_a_score_that_failed_is_missing_with_its_reason_and_the_others_count(function, why):
    evaluation = evaluation_of({"reward": failing(function)})
    started = time.monotonic()
    records = await records_of(evaluation)
    assert time.monotonic() - started < 1
    assert [record.reward for record in records] == [1.0, None, 1.0, 1.0]
    broken = records[int(BROKEN)]
    assert broken.outcome is Outcome.JUDGE_ERROR
    assert why in broken.reason
    assert broken.scores["reward"].score is None
    summary = evaluation.report("train", 0, records).summaries["reward"]
    assert (summary.mean, summary.num_examples, summary.num_unscored) == (1.0, 3, 1)


@pytest.mark.parametrize(("function", "why"), FAILURES, ids=NAMES)
async def test_a_sum_with_a_missing_part_is_missing(function, why):
    part = failing(function)
    evaluation = evaluation_of({"part": part, "reward": Weighted({"part": part}, {"part": 0.5})})
    records = await records_of(evaluation)
    assert [record.reward for record in records] == [0.5, None, 0.5, 0.5]
    assert why in records[int(BROKEN)].reason


async def test_a_failure_that_goes_away_is_forgotten_and_the_agent_does_not_run_again():
    seen = []

    def flaky(item):
        seen.append(item.id)
        return math.nan if seen.count(item.id) < 3 else 0.25

    evaluation = evaluation_of({"reward": PythonEvaluator(flaky)}, retries=2)
    records = await records_of(evaluation)
    assert [(record.outcome, record.reward, record.attempt, len(record.calls)) for record in records] == [
        (Outcome.OK, 0.25, 0, 1)
    ] * 4


async def test_evaluators_that_hang_do_not_wait_for_each_other():
    evaluation = evaluation_of({"reward": PythonEvaluator(hangs)}, retries=1)
    started = time.monotonic()
    records = await records_of(evaluation)
    assert [record.outcome for record in records] == [Outcome.JUDGE_ERROR] * 4
    assert time.monotonic() - started < 2 * TIMEOUT_S + 0.5
    left = [thread for thread in threading.enumerate() if thread.name == "evaluator"]
    assert all(thread.daemon for thread in left), "they do not keep the process alive"


async def test_a_run_continues_without_the_failed_scores(tmp_path):
    """Every fifth answer cannot be scored: no mean and no job counts it as 0."""

    def fails_often(output, expected):
        return [math.nan, None, "?"][int(output[-1]) % 3] if output[-1] in "12" else by_answer(output, expected) + 1

    run = ScriptedRun(tmp_path, reward=fails_often)
    run.settings["finetuning"]["outcomes"]["max_missing"] = 1.0
    summary = await run.run()
    assert summary.episodes["judge_error"] > 10
    rewards = [t.reward for job in run.adapter.jobs for group in job.groups for t in group.trajectories]
    assert rewards
    assert set(rewards) <= {1.0, 4.0, 5.0, 6.0, 7.0}, "0 is not among them"
    rows = [json.loads(line) for line in (tmp_path / "r" / "training_metrics.jsonl").read_text().splitlines()]
    assert sum(row["num_missing"] for row in rows) > 0
