"""If memory runs out, the micro-batches are halved for the same step; with one sample left the run gives up.

`tests/core/numerics/test_learner.py` checks the gradient of each parameter, and the memory of a device; these are runs.
"""

import json
from dataclasses import replace

import pytest

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.engine.losses.base import register_loss
from reinforge.engine.losses.policy_gradient import clipped_pg
from reinforge.engine.training.learner import Learner
from reinforge.registry import register_algorithm

STEP = ("loss", "grad_norm", "entropy", "ratio")


class Memory:
    """Memory for micro-batches of `room` samples; None: for all."""

    room: int | None = None
    largest = 0


@register_loss("test_scarce_pg")
def scarce_pg(batch, logprobs_BT, **params):
    count = len(batch.lengths)
    if Memory.room is not None and count > Memory.room:
        raise MemoryError
    Memory.largest = max(Memory.largest, count)
    return clipped_pg(batch, logprobs_BT, **params)


class ScarceConfig(GRPOConfig, name="test_scarce"):
    """GRPO whose loss needs memory."""


@register_algorithm(config_type=ScarceConfig)
async def scarce(config, builder):
    algorithm = GRPO(config)
    algorithm.loss = replace(algorithm.loss, name="test_scarce_pg")
    yield algorithm


@pytest.fixture
def run(project, monkeypatch):
    project.set("finetuning.algorithm", {"_type": "test_scarce"}).set("finetuning.num_epochs", 1)
    project.set("trajectory_builders.builder.examples_per_epoch", 4).set("finetuning.policy.batch.steps_per_job", 1)
    project.rows = project.rows[:24]
    monkeypatch.setattr(Memory, "largest", 0)
    return project


def first_row(project):
    return json.loads((project.run / "training_metrics.jsonl").read_text().splitlines()[0])


def test_a_run_with_too_little_memory_makes_the_same_step_in_smaller_micro_batches(run, monkeypatch):
    assert run.finetune().exit_code == 0
    enough, at_once = first_row(run), Memory.largest
    run.run.rename(run.folder / "enough")
    monkeypatch.setattr(Memory, "room", 3)
    monkeypatch.setattr(Memory, "largest", 0)
    result = run.finetune()
    assert result.exit_code == 0, result.output
    assert (at_once > 8, Memory.largest <= 3) == (True, True)
    assert "out of memory: reducing micro-batches to" in (run.run / "run.log").read_text()
    row = first_row(run)
    assert [row[name] for name in STEP] == pytest.approx([enough[name] for name in STEP], rel=1e-5, abs=1e-6)
    assert (row["num_updates"], row["num_samples"]) == (1, enough["num_samples"])


@pytest.mark.slow
def test_too_little_memory_for_one_sample_ends_the_run_with_advice(run, monkeypatch):
    monkeypatch.setattr(Memory, "room", 0)
    result = run.finetune()
    assert result.exit_code == 4, result.output
    assert "out of memory" in result.output
    assert "finetuning.policy.batch.micro_batch_tokens, policy.max_model_len or policy.max_num_seqs" in result.output
    assert [row["version"] for row in run.summary["policy_versions"]] == [0]


@pytest.mark.slow
def test_micro_batches_that_are_not_halved_fail(run, monkeypatch):
    """Mutation check: micro-batches that are not halved."""
    monkeypatch.setattr(Memory, "room", 3)
    monkeypatch.setattr(Learner, "_halve_micro_batches", lambda learner, samples: False)
    assert run.finetune().exit_code == 4
