"""Several iterations over a job's samples: the ratio is always against the weights at the start of the job."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.engine import Engine
from reinforge.types.sample import LossSpec, Needs
from tests.device import DEVICE
from tests.samples import random_samples

CLIPPED = LossSpec("clipped_pg", {"tis_cap": None})


def load(folder, num_iterations: int) -> Engine:
    config = PolicyConfig(
        model=str(folder), optimizer=OptimizerConfig(name="sgd", learning_rate=0.05, max_grad_norm=1e9),
        schedule=ScheduleConfig(warmup_steps=0), batch=BatchConfig(steps_per_job=1, num_iterations=num_iterations),
    )  # fmt: skip
    return Engine.load(config, seed=0, device=DEVICE)


def samples_of(engine: Engine, *, by_learner: bool):
    """Samples whose old log-probs are the sampler's, or the learner's next to different ones of the sampler."""
    samples = random_samples(5)
    for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True):
        sample.sampling_logprobs = logprobs + np.float32(0.3 if by_learner else 0.0)
    engine.score(samples, Needs(old_logprobs=by_learner))
    return samples


def train(engine: Engine, samples):
    engine.begin_job()
    return engine.update(samples, CLIPPED, progress_start=0, progress_end=1)


@pytest.mark.parametrize("by_learner", [False, True])
def test_the_second_iteration_has_the_ratio_of_the_first_update(tiny_model_dir, by_learner):
    with load(tiny_model_dir, num_iterations=1) as engine:
        samples = samples_of(engine, by_learner=by_learner)
        before = engine.logprobs(samples)
        assert train(engine, samples).metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
        after = engine.logprobs(samples)
    ratios = np.concatenate([np.exp(b - a)[s.loss_mask] for a, b, s in zip(before, after, samples, strict=True)])
    assert abs(ratios.mean() - 1) > 1e-3, "the first pass moved something"
    with load(tiny_model_dir, num_iterations=2) as engine:
        samples = samples_of(engine, by_learner=by_learner)
        report = train(engine, samples)
    assert report.num_updates == 2
    assert report.metrics["ratio"] == pytest.approx((1 + ratios.mean()) / 2, rel=1e-5)


def test_the_second_iteration_by_hand(tiny_model_dir):
    """Two iterations of one step are two steps of -min(r A, clip(r) A) with the same p_old, gradients by autograd."""
    with load(tiny_model_dir, num_iterations=2) as engine:
        samples = samples_of(engine, by_learner=False)
        old = [torch.from_numpy(logprobs) for logprobs in engine.logprobs(samples)]
        train(engine, samples)
        found = {name: p.detach().clone() for name, p in engine.learner.parameters.items()}
    with load(tiny_model_dir, num_iterations=1) as engine:
        weights = engine.learner.parameters
        for _ in range(2):
            total, weight_sum = torch.zeros(()), 0.0
            for sample, before in zip(samples, old, strict=True):
                ids, mask = torch.from_numpy(sample.token_ids)[None], torch.from_numpy(sample.loss_mask)[1:]
                scale = torch.from_numpy(sample.temperatures)[1:, None]
                logits = engine.model.module(input_ids=ids).logits[0, :-1] / scale
                logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
                ratio, a = (logprobs - before[1:]).exp(), torch.from_numpy(sample.advantages)[1:]
                gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                total = total - sample.weight * gain[mask].sum()
                weight_sum += sample.weight * int(mask.sum())
            gradients = torch.autograd.grad(total / weight_sum, list(weights.values()))
            with torch.no_grad():
                for p, gradient in zip(weights.values(), gradients, strict=True):
                    p -= 0.05 * gradient
        for name, value in found.items():
            assert (value - weights[name]).abs().max() < 1e-5, name
