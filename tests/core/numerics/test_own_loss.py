"""`engine.step`: a step with your own loss equals the one that `update` makes."""

import pytest
import torch

from reinforge.engine import Engine
from reinforge.engine.losses.policy_gradient import clipped_pg
from reinforge.errors import EngineError
from tests.engines import copy_weights, load_engine, measure_difference, train
from tests.samples import random_samples


def load(folder, *, tokens: int = 10_000, **optimizer) -> Engine:
    return load_engine(
        folder,
        optimizer={"learning_rate": 1e-2, **optimizer},
        schedule={"warmup_steps": 0},
        batch={"steps_per_job": 1, "micro_batch_tokens": tokens},
    )


def moved(folder, loss, samples=None, **settings):
    """Returns the metrics of one step and the weights after it."""
    with load(folder, **settings) as engine:
        engine.begin_job()
        metrics = engine.step(samples or random_samples(6), loss)
        return metrics, copy_weights(engine.learner)


def same(left, right, tolerance=0.0):
    return measure_difference(left.values(), right.values()) <= tolerance


def test_it_equals_a_step_of_update(tiny_model_dir):
    samples = random_samples(6)
    metrics, weights = moved(tiny_model_dir, clipped_pg, samples)
    with load(tiny_model_dir) as engine:
        report = train(engine, samples)
        assert same(weights, copy_weights(engine.learner))
    assert metrics == {k: v for k, v in report.metrics.items() if not k.startswith("mismatch")}


def by_token(batch, logprobs_BT):
    return -batch.advantages * logprobs_BT


def by_sample(batch, logprobs_BT):
    lengths_B = batch.loss_mask.sum(dim=1)
    loss_B = -(batch.advantages * logprobs_BT).sum(dim=1) / lengths_B
    return loss_B, {"likelihood": logprobs_BT.detach().sum(dim=1) / lengths_B, "rows": len(batch.lengths)}


def by_batch(batch, logprobs_BT):
    loss_B, metrics = by_sample(batch, logprobs_BT)
    return (loss_B * batch.weights).sum() / batch.weights.sum(), metrics


@pytest.mark.parametrize("loss", [by_token, by_sample, by_batch])
def test_micro_batches_do_not_change_it(tiny_model_dir, loss):
    """One batch or six of one sample: also where the loss is the mean over the batch it saw."""
    whole, weights = moved(tiny_model_dir, loss, max_grad_norm=1e9, name="sgd")
    cut, others = moved(tiny_model_dir, loss, tokens=1, max_grad_norm=1e9, name="sgd")
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert same(weights, others, 1e-6)
    if loss is not by_token:
        assert cut["likelihood"] == pytest.approx(whole["likelihood"], rel=1e-5)
        assert (whole["rows"], cut["rows"]) == (6, 1)


def test_the_mean_by_batch_is_the_mean_by_sample(tiny_model_dir):
    _, weights = moved(tiny_model_dir, by_sample, name="sgd")
    _, others = moved(tiny_model_dir, by_batch, name="sgd")
    assert same(weights, others, 1e-7)


def test_a_loss_that_is_not_finite_changes_no_bit(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        before = engine.fingerprint()
        engine.begin_job()
        assert engine.step(random_samples(3), lambda batch, logprobs_BT: logprobs_BT.sum() * torch.nan) is None
        engine.end_job()
        assert engine.fingerprint() == before
        assert engine.learner.state() == {}


def test_impossible_adapter_settings_are_refused(tiny_model_dir):
    samples = random_samples(3)
    with load(tiny_model_dir) as engine:
        with pytest.raises(EngineError, match="step: no job is open"):
            engine.step(samples, by_token)
        engine.begin_job()
        with pytest.raises(EngineError, match=r"the loss has the shape \[7\]; it must be \[B, T\] = \[3, "):
            engine.step(samples, lambda batch, logprobs_BT: logprobs_BT.sum() * torch.ones(7))
        for sample in samples:
            sample.weight = 0.0
        with pytest.raises(EngineError, match="no sample has a trained token and a weight"):
            engine.step(samples, by_token)
        assert engine.learner.num_steps == 0
