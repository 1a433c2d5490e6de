"""An evaluator that fails leaves the score missing, with the reason, never 0, and never blocks the run."""

import asyncio
import json
import math
import re
import threading

import numpy as np
import pytest

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.errors import BackendError, BackendUnavailable, EvaluationError
from reinforge.evaluation import run as run_module
from reinforge.evaluation.evaluators import base
from reinforge.evaluation.evaluators import json_schema as schema_evaluator
from reinforge.evaluation.evaluators import regex as regex_evaluator
from reinforge.evaluation.evaluators.exact_match import ExactMatch, ExactMatchConfig
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig
from reinforge.evaluation.evaluators.numeric import Numeric, NumericConfig
from reinforge.evaluation.evaluators.python import PythonEvaluator
from reinforge.evaluation.evaluators.regex import Regex, RegexConfig
from reinforge.evaluation.evaluators.weighted import Weighted
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.trajectory import Outcome
from tests.doubles import PolicyModel, ScriptedPolicy, examples
from tests.scripted_run import ScriptedRun, ask, by_answer

TIMEOUT_S = 0.5
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


HOLD = threading.Event()
"""What an evaluator that hangs waits for; nothing sets it but the end of its test."""


@pytest.fixture(autouse=True)
def _release_threads():
    HOLD.clear()
    yield
    HOLD.set()


def hangs(item):
    HOLD.wait(60)
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
    (hangs, "timed out after 0.5 s"),
    (hangs_politely, "timed out after 0.5 s"),
    (times_out_by_itself, "TimeoutError: its own database"),
    (returns(None), "returned None"),
    (returns(math.nan), "returned nan"),
    (returns(math.inf), "returned inf"),
    (returns(-math.inf), "returned -inf"),
    (returns(np.float32("nan")), "returned nan"),
    (returns(10**400), "not a finite number"),
    (returns(1e308), "beyond the largest score"),
    (returns(-1e308), "beyond the largest score"),
    (returns(10**10), "beyond the largest score"),
    (returns("0.5"), 'returned "0.5"'),
    (returns([1.0]), "returned list"),
    (returns({"score": 1.0}), "returned dict"),
    (returns(1j), "returned complex"),
    (returns(EvalOutputItem(id="1", score=None, reasoning=None)), "returned None"),
    (returns(EvalOutputItem(id="1", score=0.0, reasoning=None, error="the judge is down")), "the judge is down"),
]
NAMES = [f"{function.__name__}: {why}" for function, why in FAILURES]


def failing(function):
    if asyncio.iscoroutinefunction(function):

        async def score(item):
            return await function(item) if item.id == BROKEN else 1.0
    else:

        def score(item):
            return function(item) if item.id == BROKEN else 1.0

    return PythonEvaluator(score)


def evaluation_of(evaluators, retries=0, workflow=ask, timeout_s=60.0):
    runner = EpisodeRunner(
        bind_workflow(workflow),
        {"agent": PolicyModel(ScriptedPolicy())},
        sampling=SamplingConfig(),
        limits=LimitsConfig(evaluator_timeout_s=timeout_s),
        outcomes=OutcomesConfig(retries=retries),
        run_seed=1,
        max_concurrency=8,
    )
    splits = {"train": examples(4), "select": []}
    return DatasetEvaluation(runner, splits, evaluators, reward_metric="reward", outcomes=runner.outcomes)


async def records_of(evaluation):
    return await evaluation.collect([EpisodeKey("collect", 0, id_) for id_ in evaluation.example_ids("train")])


def limit_for(why):
    """Returns the time limit: a short one only where it is what the test is about."""
    return TIMEOUT_S if "timed out" in why else 60.0


@pytest.mark.parametrize(("function", "why"), FAILURES, ids=NAMES)
async def test_a_score_that_failed_is_missing_with_its_reason_and_the_others_count(function, why):
    """And so is a sum of which it is a part."""
    part = failing(function)
    evaluators = {"reward": part, "half": Weighted({"reward": part}, {"reward": 0.5})}
    evaluation = evaluation_of(evaluators, timeout_s=limit_for(why))
    records = await records_of(evaluation)
    assert [record.reward for record in records] == [1.0, None, 1.0, 1.0]
    assert [record.scores["half"].score for record in records] == [0.5, None, 0.5, 0.5]
    broken = records[int(BROKEN)]
    assert broken.outcome is Outcome.REWARD_ERROR
    assert why in broken.reason
    assert broken.scores["reward"].score is None
    summaries = evaluation.report("train", 0, records).summaries
    assert [(each.mean, each.num_examples, each.num_unscored) for each in (summaries["reward"], summaries["half"])] == [
        (1.0, 3, 1),
        (0.5, 3, 1),
    ]


def answers(output):
    """Returns an agent that gives the same answer to every question."""

    async def agent(item, llm, context):
        return output

    return agent


SLOW_PATTERN, SLOW_TEXT = "(a|aa)+$", "a" * 60 + "b"
"""Fails at every way of cutting 60 letters into ones and twos, which would take years."""


def matchers(timeout_s):
    schema = {"patternProperties": {"^x": {"pattern": SLOW_PATTERN}}}
    config = JsonSchemaConfig.model_validate({"schema": schema, "timeout_s": timeout_s})
    return [
        (Regex(RegexConfig(pattern=SLOW_PATTERN, timeout_s=timeout_s)), SLOW_TEXT),
        (JsonSchema(config, schema), json.dumps({"x": SLOW_TEXT})),
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["regex", "json_schema"])
async def test_a_pattern_that_takes_years_leaves_its_score_missing(number):
    evaluator, text = matchers(0.5)[number]  # so long that a busy machine does not stop the harmless pattern `^x` too
    evaluation = evaluation_of({"reward": evaluator}, workflow=answers(text))
    [record] = await evaluation.collect([EpisodeKey("e", 0, "0")])
    assert record.outcome is Outcome.JUDGE_ERROR
    assert "the pattern '(a|aa)+$' was still matching 61 characters after its time limit" in record.reason


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["regex", "json_schema"])
async def test_patterns_are_matched_beside_the_event_loop(monkeypatch, number):
    """The run's time limit for evaluators, 0.5 s, ends the wait; without the thread it cannot."""

    async def stay_on_the_loop(work, size=None):
        return work()

    async def collect_one(timeout_s):
        evaluator, text = matchers(timeout_s)[number]
        evaluation = evaluation_of({"reward": evaluator}, workflow=answers(text), timeout_s=TIMEOUT_S)
        [record] = await evaluation.collect([EpisodeKey("e", 0, "0")])
        return record

    beside = await collect_one(timeout_s=2)
    assert beside.reason == "the evaluator timed out after 0.5 s"
    monkeypatch.setattr((regex_evaluator, schema_evaluator)[number], "run_beside", stay_on_the_loop)
    on_the_loop = await collect_one(timeout_s=2 * TIMEOUT_S)
    assert on_the_loop.reason.startswith("PatternTimeout: the pattern")


WRONG_ANSWERS = ["1e400", "1" + "0" * 400, "1" * 5000, "[" * 2000 + "]" * 2000, "[" * 150 + "]" * 150, '"\\ud800"']


@pytest.mark.parametrize("text", WRONG_ANSWERS, ids=lambda text: text[:5])
async def test_no_answer_of_the_policy_makes_its_own_score_missing(text):
    number, nested = {"type": "number", "multipleOf": 0.1}, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}
    schema = {"anyOf": [number, nested]}
    evaluators = {
        "reward": JsonSchema(JsonSchemaConfig.model_validate({"schema": schema}), schema),
        "same": ExactMatch(ExactMatchConfig()),
        "number": Numeric(NumericConfig()),
    }
    evaluation = evaluation_of(evaluators, workflow=answers(text))
    for item in evaluation.examples("train"):
        item.expected_output_obj = "7"
    records = await records_of(evaluation)
    assert [(record.outcome, record.reward) for record in records] == [(Outcome.OK, 0.0)] * 4
    summaries = evaluation.report("train", 0, records).summaries
    assert [(each.mean, each.num_unscored) for each in summaries.values()] == [(0.0, 0)] * 3


async def gives_up(item, llm, context):
    raise PolicyFailure("no valid move")


async def test_a_policys_failure_counts_in_every_figure(monkeypatch):
    """A second evaluator that cannot score the absent answer does not leave the episode out."""
    evaluators = {
        "reward": PythonEvaluator(lambda item: 1.0),
        "short": PythonEvaluator(lambda item: len(item.output_obj)),
    }

    async def summarize():
        evaluation = evaluation_of(evaluators, workflow=gives_up)
        return evaluation.report("train", 0, await records_of(evaluation)).summaries["short"]

    summary = await summarize()
    assert (summary.mean, summary.num_examples, summary.num_unscored) == (0.0, 4, 0)
    missing = EvalOutputItem(id="1", score=None, reasoning=None, error="no answer")
    monkeypatch.setattr(DatasetEvaluation, "_penalize", lambda self, record, penalty=None: missing)
    assert (await summarize()).num_unscored == 4


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


async def test_without_that_rule_a_missing_score_would_be_0(monkeypatch):
    """The mutation."""
    monkeypatch.setattr(base, "missing_score", lambda item, reason: EvalOutputItem(id=item.id, score=0, reasoning=None))
    records = await records_of(evaluation_of({"reward": failing(raises)}))
    assert [(record.outcome, record.reward) for record in records] == [
        (Outcome.OK, 0.0 if record.key.example_id == BROKEN else 1.0) for record in records
    ]


@pytest.mark.fault
async def test_without_the_time_limit_an_evaluator_that_hangs_is_waited_for(monkeypatch):
    """The mutation: with the limit, the same takes half a second."""
    score = run_module.score_item
    monkeypatch.setattr(run_module, "score_item", lambda evaluator, item, timeout_s: score(evaluator, item))
    waiting = asyncio.create_task(records_of(evaluation_of({"reward": failing(hangs)}, timeout_s=TIMEOUT_S)))
    done, _ = await asyncio.wait({waiting}, timeout=3 * TIMEOUT_S)
    assert not done
    HOLD.set()
    assert [record.reward for record in await waiting] == [1.0] * 4


async def test_evaluators_run_at_the_same_time():
    everyone = threading.Barrier(4)

    def meet(item):
        everyone.wait(60)
        return 1.0

    records = await records_of(evaluation_of({"reward": PythonEvaluator(meet)}))
    assert [record.reward for record in records] == [1.0] * 4


async def test_evaluators_that_hang_do_not_keep_the_process_alive():
    records = await records_of(evaluation_of({"reward": PythonEvaluator(hangs)}, retries=1, timeout_s=TIMEOUT_S))
    assert [record.outcome for record in records] == [Outcome.REWARD_ERROR] * 4
    left = [thread for thread in threading.enumerate() if thread.name == "evaluator"]
    assert left
    assert all(thread.daemon for thread in left)


async def test_a_run_continues_without_the_failed_scores(tmp_path):
    """Every fifth answer cannot be scored: no mean and no job counts it as 0."""

    def fails_often(output, expected):
        return [math.nan, None, 1e308][int(output[-1]) % 3] if output[-1] in "12" else by_answer(output, expected) + 1

    run = ScriptedRun(tmp_path, reward=fails_often)
    run.settings["finetuning"]["outcomes"]["max_missing"] = 1.0
    summary = await run.run()
    assert summary.episodes["reward_error"] > 10
    rewards = [t.reward for job in run.adapter.jobs for group in job.groups for t in group.trajectories]
    assert rewards
    assert set(rewards) <= {1.0, 4.0, 5.0, 6.0, 7.0}, "0 is not among them"
    rows = [json.loads(line) for line in (tmp_path / "r" / "training_metrics.jsonl").read_text().splitlines()]
    assert sum(row["num_missing"] for row in rows) > 0


class FailsAtItsValidations:
    """An agent whose environment is down in every validation after the baseline."""

    def __init__(self, error):
        self.error, self.has_trained = error, False

    async def __call__(self, item, llm, context):
        self.has_trained |= context.is_training
        if self.has_trained and not context.is_training:
            raise self.error
        return await ask(item, llm, context)


@pytest.mark.parametrize(
    ("error", "kind", "cause"),
    [
        (RuntimeError("no database"), EvaluationError, "tool_error: RuntimeError: no database"),
        (BackendError("503"), BackendUnavailable, "backend_error: BackendError: 503"),
    ],
)
@pytest.mark.parametrize(
    ("interval", "epoch"),
    [pytest.param(1, 0, id="in between"), pytest.param(5, 1, id="the last", marks=pytest.mark.fault)],
)
async def test_a_validation_without_scores_stops_the_run_and_names_the_commonest_reason(
    tmp_path, error, kind, cause, interval, epoch
):
    run = ScriptedRun(tmp_path, workflow=FailsAtItsValidations(error))
    run.settings["finetuning"]["run_configuration"] = {"validation_interval": interval}
    what = f"the validation after epoch {epoch}: 3 of 3 examples have no score, more than outcomes.max_missing (50%)"
    with pytest.raises(kind, match=re.escape(what)) as caught:
        await run.run()
    assert cause in str(caught.value)
    assert caught.value.exit_code == (3 if kind is EvaluationError else 4)


@pytest.mark.slow
async def test_with_max_missing_of_1_such_a_run_goes_on(tmp_path):
    """The mutation: nothing is checked, and the run reaches its end without a validation to choose by."""
    run = ScriptedRun(tmp_path, workflow=FailsAtItsValidations(RuntimeError("no database")))
    run.settings["finetuning"]["outcomes"]["max_missing"] = 1.0
    summary = await run.run()
    assert (summary.status, summary.promoted) == ("completed", False)
    assert summary.final.num_unscored == 3
