"""bfloat16: updates too small for 8 bits add up, and the mismatch of sampler and learner is corrected."""

import numpy as np
import pytest
import torch

from reinforge.engine.model.loading import load_module
from reinforge.engine.training.learner import JobProgress, Learner
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.types.sample import LossSpec, Needs
from tests.engines import CLIPPED, LIKELIHOOD, load_engine
from tests.engines import make_learner as make
from tests.models import make_tiny_model
from tests.samples import random_samples

SMALL = 2e-5


def make_learner(folder, dtype, **optimizer) -> Learner:
    """A learner with the same numbers in any type."""
    optimizer = {"learning_rate": SMALL, **optimizer}
    return make(load_module(folder, torch.bfloat16).to(dtype), optimizer=optimizer, batch={"steps_per_job": 1})


def make_unscored(count):
    samples = random_samples(count)
    for sample in samples:
        sample.old_logprobs = None
    return samples


def load(folder, **settings):
    return load_engine(folder, device="cpu", **{"dtype": "bfloat16", **settings})


def matrices(learner) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in learner.parameters.values() if p.ndim >= 2])


def test_steps_that_are_too_small_for_bfloat16_add_up(tmp_path):
    """Adam moves a weight by about 2e-5 a step; half a unit in the last place of 0.01 is 3e-5."""
    samples, moved = random_samples(1), {}
    folder = make_tiny_model(tmp_path / "m", num_hidden_layers=1, hidden_size=32)
    for dtype in (torch.float32, torch.bfloat16):
        learner = make_learner(folder, dtype)
        before = matrices(learner)
        learner.update(samples, LIKELIHOOD, JobProgress(0, 0, 0))
        first = (matrices(learner) - before).abs()
        for epoch in range(1, 30):
            learner.update(samples, LIKELIHOOD, JobProgress(0, 0, epoch))
        moved[dtype] = matrices(learner) - before
        if dtype == torch.bfloat16:
            seen = before.abs() > 0.01  # below, units in the last place are small enough
            assert (first[seen] == 0).float().mean() > 0.95, "one step is lost on nearly every weight"
    plain, rounded = moved[torch.float32], moved[torch.bfloat16]
    assert rounded.norm().item() == pytest.approx(plain.norm().item(), rel=0.1)
    assert torch.nn.functional.cosine_similarity(plain, rounded, dim=0) > 0.9


def test_gradients_of_micro_batches_are_summed_in_float32(tiny_model_dir):
    """1 + 64 times 1/256: each addend is lost in bfloat16 and none in float32."""
    learner = make_learner(tiny_model_dir, torch.bfloat16)
    name, weight = next(iter(learner.parameters.items()))
    for size in [1.0] + [1 / 256] * 64:
        weight.grad = torch.full_like(weight, size)
        learner.masters.take_gradients()
    assert weight.grad is None
    assert learner.masters.copies[name].grad.unique().tolist() == [1.25]


def test_float32_has_no_copies(tiny_model_dir):
    learner = make_learner(tiny_model_dir, torch.float32)
    assert learner.masters.copies == {}
    assert all(learner.masters.optimized[name] is p for name, p in learner.parameters.items())


@pytest.mark.parametrize(("dtype", "asked", "computed"), [
    ("float32", "inexact", False), ("bfloat16", "inexact", True), ("float32", True, True), ("bfloat16", False, False),
])  # fmt: skip
def test_old_logprobs_are_computed_where_the_samplers_are_inexact(tiny_model_dir, dtype, asked, computed):
    samples = make_unscored(3)
    with load(tiny_model_dir, dtype=dtype) as engine:
        engine.score(samples, Needs(old_logprobs=asked))
    assert all((sample.old_logprobs is not None) == computed for sample in samples)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [{"steps_per_job": 1}, {"steps_per_job": 2, "num_iterations": 2}])
def test_deferred_old_logprobs_are_those_from_before_the_job(tiny_model_dir, batch):
    """The first step takes them from its own forward pass; those of later steps are computed before it."""
    found, weights = [], []
    for defer in (False, True):
        samples = make_unscored(4)
        with load(tiny_model_dir, batch=batch, optimizer={"learning_rate": 1e-2}) as engine:
            engine.begin_job()
            engine.score(samples, Needs(old_logprobs="inexact"), defer=defer)
            assert all((sample.old_logprobs is None) == defer for sample in samples)
            engine.update(samples, CLIPPED, progress_start=0.0, progress_end=0.1)
            weights.append(torch.cat([p.flatten().float() for p in engine.learner.masters.optimized.values()]))
            engine.rollback()
        found.append(np.concatenate([sample.old_logprobs for sample in samples]))
    assert np.allclose(found[0], found[1], atol=0.02)  # batches of other rows round differently
    assert np.abs(found[0]).max() > 1
    change = (weights[0] - weights[1]).abs().mean()
    assert change < 1e-3


@pytest.mark.parametrize("bad_step", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_deferred_old_logprobs_are_from_before_the_job_though_a_step_is_skipped(tiny_model_dir, bad_step):
    """Steps of two samples, twice over, in other pairs; advantages that are not finite skip their own steps only."""
    samples = make_unscored(4)
    batch = {"steps_per_job": 2, "num_iterations": 2}
    with load(tiny_model_dir, batch=batch, optimizer={"learning_rate": 1e-2}) as engine:
        before = engine.logprobs(samples)
        engine.begin_job()
        engine.score(samples, Needs(old_logprobs="inexact"), defer=True)
        plans = {epoch: engine.learner.plan_steps(samples, epoch) for epoch in range(20)}
        epoch = next(n for n, steps in plans.items() if steps[bad_step] == [0, 1] and [0, 1] not in steps[2:])
        samples[0].advantages = np.full(len(samples[0]), np.nan, np.float32)
        report = engine.update(samples, CLIPPED, progress_start=0.0, progress_end=0.1, epoch=epoch)
        assert report.num_skipped_steps == 2
        after = engine.logprobs(samples)
        engine.rollback()
    for index in (1, 2, 3):
        assert np.abs(after[index] - before[index]).max() > 0.2
        assert np.allclose(samples[index].old_logprobs, before[index], atol=0.02)


def test_deferring_forgets_the_old_logprobs_of_an_earlier_job(tiny_model_dir):
    samples = random_samples(3)
    with load(tiny_model_dir) as engine:
        engine.score(samples, Needs(old_logprobs="inexact"))
        engine.score(samples, Needs(old_logprobs="inexact"), defer=True)
    assert all(sample.old_logprobs is None for sample in samples)


def test_old_logprobs_are_not_deferred_where_credit_compares_them_with_the_reference(tiny_model_dir):
    samples = make_unscored(3)
    with load(tiny_model_dir, keep_reference=True) as engine:
        engine.score(samples, Needs(old_logprobs="inexact", ref_logprobs=True), defer=True)
    assert all(sample.old_logprobs is not None for sample in samples)


@pytest.mark.slow
def test_a_sampler_that_is_0_05_off_is_measured_and_corrected(tiny_model_dir):
    """p_old / p_sampler = e^0.05: the gradient is that of an exact sampler times 1.0513, as the estimate should be."""
    found = []
    for offset, cap in ((0.0, 2.0), (0.05, 2.0), (0.05, None), (0.05, 1.0), (-0.05, 2.0)):
        learner = make_learner(tiny_model_dir, torch.float32, max_grad_norm=1e9)
        samples = random_samples(5)
        for sample, old in zip(samples, sample_logprobs(learner.model, samples, 4096), strict=True):
            sample.old_logprobs, sample.sampling_logprobs = old, old - np.float32(offset)
        report = learner.update(samples, LossSpec("clipped_pg", {"tis_cap": cap}), JobProgress(0, 0, 0))
        found.append(report.metrics)
    exact, seldom, trusted, capped, often = found
    assert seldom["mismatch"] == pytest.approx(0.05, abs=1e-5)
    assert seldom["mismatch_kl"] == pytest.approx(np.exp(0.05) - 1.05, abs=1e-6)
    assert exact["mismatch"] < 1e-6
    norms = [metrics["grad_norm"] / exact["grad_norm"] for metrics in (seldom, trusted, capped, often)]
    assert norms == pytest.approx([np.exp(0.05), 1.0, 1.0, np.exp(-0.05)], rel=1e-5)
    assert seldom["ratio"] == pytest.approx(1.0), "the clip is about the learner's own log-probs"


def test_the_mismatch_is_measured_in_the_first_step_only(tiny_model_dir):
    """Later steps have other weights than the sampler had; tokens that were not sampled are left out."""
    learner = make_learner(tiny_model_dir, torch.float32, learning_rate=0.05)
    learner.config.batch.num_iterations = 3
    samples = random_samples(4)
    for sample, old in zip(samples, sample_logprobs(learner.model, samples, 4096), strict=True):
        sample.sampling_logprobs = old
    report = learner.update(samples, CLIPPED, JobProgress(0, 0, 0))
    assert report.num_updates == 3
    assert report.metrics["mismatch"] < 1e-6
    for sample in samples:
        sample.sampling_logprobs = np.full(len(sample), np.nan, np.float32)
    assert "mismatch" not in learner.update(samples, LIKELIHOOD, JobProgress(0, 0, 1)).metrics
