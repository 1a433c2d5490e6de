"""Optimizer steps: one by hand, what NaN and too little memory change, the order of samples, and learning rates."""

import math
from itertools import chain

import numpy as np
import pytest
import torch

from reinforge.config.policy import ScheduleConfig
from reinforge.engine import LossOutput, register_loss
from reinforge.engine.training import learner as learner_module
from reinforge.engine.training.learner import JobProgress, Learner
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.engine.training.micro_batches import pack_rows
from reinforge.engine.training.scheduled_optimizer import learning_rate_factor
from reinforge.errors import EngineError, TrajectoryError
from reinforge.types.sample import LossSpec
from tests.engines import copy_weights
from tests.engines import make_learner as make
from tests.samples import random_samples

CLIPPED = LossSpec("clipped_pg", {"clip_low": 0.2, "clip_high": 0.2})
ALL = JobProgress(0.0, 1.0)


def make_learner(folder, **batch) -> Learner:
    return make(folder, optimizer={"learning_rate": 1e-2, "weight_decay": 0.1}, batch=batch)


@register_loss("test_nan_for_token_7")
def nan_for_token_7(batch, logprobs_BT):
    return LossOutput(torch.where(batch.token_ids == 7, torch.nan, -logprobs_BT))


def test_one_step_by_hand(tiny_model_dir):
    """The step's gradient is that of sum_t w_s l_t / sum_t w_s over the whole step."""
    samples = random_samples(5)
    learner = make_learner(tiny_model_dir, steps_per_job=1)
    module, total, weight_sum = learner.model.module, 0.0, 0.0
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids)[None]
        logits = module(input_ids=ids).logits[0]
        for t in np.flatnonzero(sample.loss_mask):
            logp = torch.log_softmax(logits[t - 1] / float(sample.temperatures[t]), -1)[ids[0, t]]
            ratio = (logp - float(sample.sampling_logprobs[t])).exp()
            a = float(sample.advantages[t])
            total = total - sample.weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            weight_sum += sample.weight
    loss = total / weight_sum
    expected = torch.autograd.grad(loss, list(learner.parameters.values()))
    norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in expected))
    before = copy_weights(learner)
    report = learner.update(samples, CLIPPED, ALL)
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (report.num_updates, report.num_samples) == (1, 5)
    assert report.num_tokens == sum(sample.num_trained for sample in samples)
    # AdamW's first step moves each weight by lr * sign(gradient), after decaying matrices by lr * 0.1
    for (name, p), g in zip(learner.parameters.items(), expected, strict=True):
        decay = 1e-2 * 0.1 if p.ndim >= 2 else 0.0
        clear = g.abs() > 1e-4 * norm
        moved = before[name] * (1 - decay) - 1e-2 * g.sign()
        assert torch.allclose(p[clear], moved[clear], atol=2e-4), name


def test_only_the_step_that_is_not_finite_is_skipped(tiny_model_dir):
    learner = make_learner(tiny_model_dir, batch_size=1)
    samples = random_samples(4)
    samples[2].token_ids[-1] = 7
    report = learner.update(samples, LossSpec("test_nan_for_token_7"), ALL)
    assert (report.num_updates, report.skipped_samples, report.num_samples) == (3, [2], 3)


def test_steps_are_shuffled_by_seed_and_epoch_and_split_evenly(tiny_model_dir):
    learner = make_learner(tiny_model_dir, batch_size=4, num_iterations=2)
    samples = random_samples(10)
    samples[3].loss_mask[:] = False
    plan = learner.plan_steps(samples, epoch=0)
    assert [len(step) for step in plan] == [3, 3, 3, 3, 3, 3]
    assert sorted(chain(*plan[:3])) == sorted(chain(*plan[3:])) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert plan == learner.plan_steps(samples, epoch=0)
    assert plan[:3] != plan[3:]
    assert plan != learner.plan_steps(samples, epoch=1)


def test_rates_follow_warm_up_and_progress():
    linear = ScheduleConfig(name="linear", warmup_steps=10, final_fraction=0.1)
    assert learning_rate_factor(linear, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate_factor(linear, 50, 0.5) == pytest.approx(0.55)
    cosine = ScheduleConfig(name="cosine", warmup_steps=0, final_fraction=0.1)
    assert [learning_rate_factor(cosine, 9, p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.55, 0.1])
    assert learning_rate_factor(ScheduleConfig(warmup_steps=0), 0, 0.9) == 1.0


def test_micro_batches_hold_rows_of_similar_length():
    assert pack_rows([3, 9, 4, 8], 16) == [[0, 2], [3], [1]]
    assert pack_rows([3, 9, 4, 8], 20) == [[0, 2], [3, 1]]
    assert pack_rows([50, 2], 10) == [[1], [0]]


def test_a_first_token_cannot_be_trained(tiny_model_dir):
    sample = random_samples(1)[0]
    sample.loss_mask[0] = True
    with pytest.raises(TrajectoryError, match="first token"):
        sample_logprobs(make_learner(tiny_model_dir).model, [sample], 100)


def test_stopping_ends_an_update_at_the_next_micro_batch(tiny_model_dir):
    """An interrupted run relies on this: it must not wait for the rest of a long job."""
    learner = make_learner(tiny_model_dir)
    before = copy_weights(learner)
    learner.stopping.set()
    with pytest.raises(EngineError, match="closed"):
        learner.update(random_samples(4), LossSpec("cross_entropy"), JobProgress(0.0, 1.0, 0))
    assert all(torch.equal(before[name], value) for name, value in copy_weights(learner).items())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_running_out_of_memory_halves_micro_batches_and_changes_no_gradient(tiny_model_dir, monkeypatch, error):
    """The step equals the one with enough memory, within 1e-5 of the gradient; the smaller batches stay."""
    samples, moved = random_samples(9, seed=1), []
    for limit in (10_000, 40):
        learner = make_learner(tiny_model_dir, steps_per_job=1, micro_batch_tokens=100)
        plain, captured, sizes = learner_module.token_logprobs, {}, []

        def scarce(model, batch, limit=limit, plain=plain, sizes=sizes, **options):
            sizes.append(batch.token_ids.numel())
            if len(sizes) > 1 and sizes[-1] > limit:  # not the first, whose gradient must not count twice
                raise error
            return plain(model, batch, **options)

        monkeypatch.setattr(learner_module, "token_logprobs", scarce)
        learner.optimizer.register_step_pre_hook(
            lambda *_, learner=learner, captured=captured: captured.update(
                {name: p.grad.clone() for name, p in learner.parameters.items()}
            )
        )
        assert learner.update(samples, CLIPPED, ALL).num_updates == 1
        monkeypatch.undo()
        moved.append(captured)
        assert (learner.micro_batch_tokens < 100) == (limit == 40)
    for name, gradient in moved[0].items():
        assert torch.allclose(gradient, moved[1][name], rtol=1e-5, atol=1e-6), name
