"""Basic evaluators, and the rule that an invalid score is missing and never 0.0."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from reinforge.config.imports import import_object
from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.exact_match import ExactMatch, ExactMatchConfig
from reinforge.evaluation.evaluators.numeric import Numeric, NumericConfig, find_last_number
from reinforge.evaluation.evaluators.python import (
    LOADER,
    IsolatedEvaluator,
    PythonEvaluator,
    PythonEvaluatorConfig,
    python_evaluator,
)
from reinforge.interfaces import Evaluator
from reinforge.rollout.isolation.worker_pool import WorkerPool, refuse_other_functions
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.steps import IntermediateStepType
from tests.core.e2e.test_reporting import LearningRun
from tests.doubles import examples, make_item


class Returns(Evaluator):
    def __init__(self, result):
        self.result = result

    async def evaluate(self, item):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def scored(score):
    return EvalOutputItem(id="other", score=score, reasoning="because")


@pytest.mark.parametrize(
    ("result", "score"),
    [(scored(0.5), 0.5), (scored(1), 1.0), (scored(True), 1.0), (scored(np.float32(0.5)), 0.5), (0.25, 0.25)],
)
async def test_a_number_is_a_score(result, score):
    found = await score_item(Returns(result), make_item("x"))
    assert (found.id, found.score, type(found.score), found.error) == ("q1", score, float, None)


async def test_cancellation_propagates():
    class Waits(Evaluator):
        async def evaluate(self, item):
            await asyncio.sleep(60)
            raise AssertionError

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(score_item(Waits(), make_item("x")), 0.01)


@pytest.mark.parametrize(
    ("output", "expected", "options", "score"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("5", 5, {}, 1.0),
        ([1, 2], [1, 2], {}, 1.0),
        ('{"a": 1}', {"a": 1}, {}, 1.0),
        ('{"a": 2}', {"a": 1}, {}, 0.0),
        ("[" * 100_000, [1], {}, 0.0),
        ("a  b", "a b", {}, 0.0),
        ("a \n b", "a b", {"collapse_space": True}, 1.0),
        ("b", ["a", "b"], {"any_of": True}, 1.0),
        ("c", ["a", "b"], {"any_of": True}, 0.0),
        ("c", "c", {"any_of": True}, None),
        (None, "", {}, 0.0),
        (None, "None", {}, 0.0),
        ("x", None, {}, None),
    ],
)
async def test_exact_match(output, expected, options, score):
    found = await score_item(ExactMatch(ExactMatchConfig(**options)), make_item(output, expected))
    assert found.score == score
    assert (found.error is None) == (score is not None)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", 7.0),
        ("$1,234.50", 1234.5),
        ("1, 2", 2.0),
        ("between 10-5", 5.0),
        ("item-7", 7.0),
        ("= -5", -5.0),
        ("−3", -3.0),
        ("(-.5)", -0.5),
        ("x = -2e3", -2000.0),
        ("50%", 50.0),
        ("3.14.", 3.14),
        ("none", None),
        ("1e999", None),
        ("", None),
        (7, 7.0),
        (True, None),
        (None, None),
        ("7 " + " " * 1_000_000, 7.0),
        ("-" * 1_000_000, None),
        ("so 12,345.5e1a", 1.0),
        ("9" * 20_000, None),
        ("٣", 3.0),
    ],
)
def test_find_last_number(text, number):
    assert find_last_number(text) == number


async def test_numeric():
    evaluator = Numeric(NumericConfig())
    assert (await score_item(evaluator, make_item("it is 5", "5"))).score == 1.0
    assert (await score_item(evaluator, make_item("it is 5.01", 5))).score == 0.0
    assert (await score_item(evaluator, make_item("I do not know", 5))).score == 0.0
    assert (await score_item(evaluator, make_item("5", "five"))).error == "the expected output 'five' has no number"
    loose = Numeric(NumericConfig(abs_tolerance=0, rel_tolerance=0.01))
    assert (await score_item(loose, make_item("101", 100))).score == 1.0
    assert (await score_item(loose, make_item("102", 100))).score == 0.0


def by_item(item):
    return 0.5 if item.output_obj == "x" else 0.0


def by_answers(output, expected):
    return output == expected


async def by_item_slowly(item, patience=3):
    await asyncio.sleep(0)
    return EvalOutputItem(id=item.id, score=0.75, reasoning="slow")


class Judge:
    def __call__(self, output, expected):
        return None if expected == "?" else 1.0


async def test_a_users_function_takes_the_item_or_output_and_expected_output():
    async def score(function, output="x", expected="x"):
        return (await score_item(PythonEvaluator(function), make_item(output, expected))).score

    assert await score(by_item) == 0.5
    assert await score(by_answers) == 1.0
    assert await score(by_answers, expected="y") == 0.0
    assert await score(by_item_slowly) == 0.75
    assert await score(Judge()) == 1.0
    assert await score(Judge(), expected="?") is None
    assert await score(lambda item: 1 / 0) is None


@pytest.mark.parametrize("function", [lambda: 1, lambda a, b, c: 1, lambda item, *, k: 1, Judge, 5])
def test_a_function_with_other_parameters_is_rejected(function):
    with pytest.raises(ConfigError, match="reward\\(item\\) or reward\\(output, expected\\)"):
        PythonEvaluator(function)


async def test_a_users_function_is_named_in_the_configuration(tmp_path):
    (tmp_path / "rfg_reward.py").write_text("def reward(output, expected): return len(output)\n")
    builder = SimpleNamespace(project_root=tmp_path)
    async for evaluator in python_evaluator(PythonEvaluatorConfig(function="rfg_reward:reward"), builder):
        assert (await score_item(evaluator, make_item("abc"))).score == 3.0
    with pytest.raises(ConfigError, match="is not allowed"):
        async for _ in python_evaluator(PythonEvaluatorConfig(function="os:system"), builder):
            pass
    with pytest.raises(ValueError, match='expected "module:name", found int'):
        PythonEvaluatorConfig(function=5)


async def marking(item, llm, context):
    for number in range(2):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
        context.mark(step_reward=0.25 * (number + 1))
    return reply.choices[0].message.content


def sum_of_steps(item):
    """Each reply's digit, and the rewards of the steps: known only from `item.trajectory`."""
    replies = [step.payload.data.output for step in item.trajectory if step.event_type == IntermediateStepType.LLM_END]
    marks = [(step.payload.metadata or {}).get("step_reward", 0.0) for step in item.trajectory if step.name == "mark"]
    assert replies[-1] == item.output_obj
    return sum(float(reply[-1]) for reply in replies) + sum(marks)


async def test_a_reward_computed_from_steps_trains(tmp_path):
    run = LearningRun(tmp_path, workflow=marking, reward=sum_of_steps)
    run.settings["trajectory_builders"]["builder"]["examples_per_epoch"] = 4
    summary = await run.run()
    assert (summary.status, summary.num_jobs) == ("completed", 2), summary.reason
    rewards = [
        trajectory.reward for job in run.adapter.jobs for group in job.groups for trajectory in group.trajectories
    ]
    assert {reward % 1 for reward in rewards} == {0.75}, "0.25 and 0.5 of the two marks"
    assert len(set(rewards)) > 2


REWARDS = """
import os, time
import numpy as np
from reinforge.finetuning import EvalOutputItem

def reward(item):
    kind = item.output_obj
    if kind == "kill":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    if kind == "raise":
        raise ValueError("no such answer")
    if kind == "item":
        return EvalOutputItem(id=item.id, score=np.float32(0.25), reasoning={"why": ["a", 1]})
    if kind == "error":
        return EvalOutputItem(id=item.id, score=None, reasoning=None, error="cannot be scored")
    if kind == "expected":
        return float(item.expected_output_obj == "yes" and item.full_dataset_entry == {"id": item.id})
    return {"half": 0.5, "true": True, "none": None, "text": "0.5", "nan": float("nan"), "numpy": np.float64(2.0),
            "integer": np.int64(3), "list": [1]}[kind]

async def slow(output, expected):
    return len(output)

def wrong(first, second, third):
    return 1
"""

KINDS = ["half", "true", "none", "text", "nan", "numpy", "integer", "list", "raise", "item", "error", "expected"]


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


async def scores_of(evaluator, kinds, timeout_s=60.0):
    items = examples(len(kinds))
    for item, kind in zip(items, kinds, strict=True):
        item.output_obj = kind
    return [await score_item(evaluator, item, timeout_s) for item in items]


async def test_scores_and_reasons_are_those_of_this_process(rewards):
    pool = WorkerPool("rewards:reward", rewards, LOADER)
    there = await scores_of(IsolatedEvaluator(pool), KINDS)
    assert len(pool.workers) == 1, "a worker whose function raised is used again"
    await pool.close()
    here = await scores_of(PythonEvaluator(import_object("rewards:reward", rewards)), KINDS)
    assert there == here
    assert [score.score for score in here[:2]] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("kill", "WorkerEnded: the process exited with code 3"),
        pytest.param("hang", "the evaluator timed out after 8 s", marks=pytest.mark.slow),
    ],
)
async def test_a_process_that_ends_or_hangs_costs_one_score(rewards, kind, error):
    pool = WorkerPool("rewards:reward", rewards, LOADER)
    await pool.start()
    [failed] = await scores_of(IsolatedEvaluator(pool), [kind], timeout_s=8.0)
    [scored] = await scores_of(IsolatedEvaluator(pool), ["half"])  # in a new process, whose start counts
    await pool.close()
    assert (failed.error, scored.score) == (error, 0.5)


@pytest.mark.slow
async def test_an_async_function_with_two_parameters(rewards):
    pool = WorkerPool("rewards:slow", rewards, LOADER)
    assert [score.score for score in await scores_of(IsolatedEvaluator(pool), ["three"])] == [5.0]
    await pool.close()


@pytest.mark.slow
async def test_other_functions_are_refused(rewards):
    pool = WorkerPool("rewards:wrong", rewards, LOADER)
    with pytest.raises(ConfigError, match="has the wrong parameters"):
        await pool.start()
    assert pool.workers == []
    with pytest.raises(ConfigError, match="`process` needs the function's name, but .*<lambda> is a Python object"):
        refuse_other_functions(lambda output, expected: 1)
