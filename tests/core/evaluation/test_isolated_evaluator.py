"""The `python` evaluator in worker processes: the scores and reasons of this process, and failures that cost one."""

import pytest

from reinforge.config.imports import import_object
from reinforge.errors import ConfigError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.python import LOADER, IsolatedEvaluator, PythonEvaluator
from reinforge.rollout.isolation.worker_pool import WorkerPool, refuse_other_functions
from tests.doubles import examples

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


async def test_a_process_that_ends_or_hangs_costs_one_score(rewards):
    pool = WorkerPool("rewards:reward", rewards, LOADER)
    await pool.start()
    killed, hung, scored = await scores_of(IsolatedEvaluator(pool), ["kill", "hang", "half"], timeout_s=3.0)
    await pool.close()
    assert killed.error == "WorkerEnded: the process exited with code 3"
    assert hung.error == "the evaluator timed out after 3 s"
    assert scored.score == 0.5


async def test_an_async_function_with_two_parameters(rewards):
    pool = WorkerPool("rewards:slow", rewards, LOADER)
    assert [score.score for score in await scores_of(IsolatedEvaluator(pool), ["three"])] == [5.0]
    await pool.close()


async def test_other_functions_are_refused(rewards):
    pool = WorkerPool("rewards:wrong", rewards, LOADER)
    with pytest.raises(ConfigError, match="has the wrong parameters"):
        await pool.start()
    assert pool.workers == []
    with pytest.raises(ConfigError, match="`process` needs the function's name, but .*<lambda> is a Python object"):
        refuse_other_functions(lambda output, expected: 1)
