"""Several iterations over a job's samples: the ratio is always against the weights at the start of the job."""

import numpy as np
import pytest

from reinforge.engine import Engine
from reinforge.types.sample import LossSpec, Needs
from tests.engines import load_engine, train
from tests.samples import random_samples

CLIPPED = LossSpec("clipped_pg", {"tis_cap": None})


def load(folder, num_iterations: int) -> Engine:
    return load_engine(
        folder,
        optimizer={"name": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9},
        schedule={"warmup_steps": 0},
        batch={"steps_per_job": 1, "num_iterations": num_iterations},
    )


def samples_of(engine: Engine, *, by_learner: bool):
    """Samples whose old log-probs are the sampler's, or the learner's next to different ones of the sampler."""
    samples = random_samples(5)
    for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True):
        sample.sampling_logprobs = logprobs + np.float32(0.3 if by_learner else 0.0)
    engine.score(samples, Needs(old_logprobs=by_learner))
    return samples


@pytest.mark.parametrize("by_learner", [False, True])
def test_the_second_iteration_has_the_ratio_of_the_first_update(tiny_model_dir, by_learner):
    with load(tiny_model_dir, num_iterations=1) as engine:
        samples = samples_of(engine, by_learner=by_learner)
        before = engine.logprobs(samples)
        assert train(engine, samples, CLIPPED).metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
        after = engine.logprobs(samples)
    ratios = np.concatenate([np.exp(b - a)[s.loss_mask] for a, b, s in zip(before, after, samples, strict=True)])
    assert abs(ratios.mean() - 1) > 1e-3, "the first pass moved something"
    with load(tiny_model_dir, num_iterations=2) as engine:
        samples = samples_of(engine, by_learner=by_learner)
        report = train(engine, samples, CLIPPED)
    assert report.num_updates == 2
    assert report.metrics["ratio"] == pytest.approx((1 + ratios.mean()) / 2, rel=1e-5)
