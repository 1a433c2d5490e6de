"""KTO against arithmetic written here: the value of a reply, its weight, and the KL baseline of a whole step."""

import math

import numpy as np
import pytest
import torch

from reinforge.algorithms.kto import KTO, add_mismatched
from reinforge.engine.losses.base import find_loss
from reinforge.engine.losses.preference import kto
from reinforge.engine.training import kl_baseline
from reinforge.engine.training.collate import collate
from reinforge.engine.training.kl_baseline import combine_kl, sum_kl
from reinforge.engine.training.learner import JobProgress
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.errors import ConfigError, EngineError
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec, add_mismatched_samples
from tests.core.numerics.test_losses import assert_gradient_is_slope
from tests.core.numerics.test_whole_path import make_learner, step
from tests.samples import make_sample, sibling_samples

SPEC = LossSpec("kto", {"beta": 0.3})


def estimate_kl(model, samples, max_tokens):
    """The baseline of a step that one process computes."""
    return combine_kl([sum_kl(samples, lambda chosen: sample_logprobs(model, chosen, max_tokens))])


def sigma(x):
    return 1 / (1 + math.exp(-x))


def reply(ids, ref, credit):
    """A sample of prompt [1, 2] with reference log-probs; the credit is its weight, negative if undesirable."""
    sample = make_sample(TokenLogprobs((1, 2), tuple(ids), (-1.0,) * len(ids)), credit)
    sample.ref_logprobs = sample.sampling_logprobs.copy()
    sample.ref_logprobs[sample.loss_mask] = ref
    return sample


def good_and_bad():
    """A good reply with r = 3 x 0.4 = 1.2 and weight 1.5, and a bad one with r = 0.5 and weight 1; z = 0.2."""
    batch = collate([reply([7, 8, 9], [-1.0, -1.0, -1.0], 1.5), reply([5, 6], [-2.5, -1.0], -1.0)])
    batch.kl_baseline = 0.2
    logprobs = torch.tensor([[0.0, 0.0, -0.6, -0.6, -0.6], [0.0, 0.0, -2.0, -1.0, 0.0]])
    return batch, logprobs


def test_a_reply_is_worth_its_distance_from_the_baseline():
    batch, logprobs = good_and_bad()
    output = kto(batch, logprobs, beta=0.3)
    expected = [1.5 * (1 - sigma(0.3 * (1.2 - 0.2))), 1 - sigma(0.3 * (0.2 - 0.5))]
    assert output.loss.tolist() == pytest.approx(expected)
    assert output.metrics["kl_baseline"].item() == pytest.approx(0.2)
    assert output.metrics["desirable_logratio"].tolist() == pytest.approx([1.2])
    assert output.metrics["undesirable_logratio"].tolist() == pytest.approx([0.5])


def test_metrics_of_a_kind_that_is_absent_are_absent():
    batch = collate([reply([5], [-1.0], 1.0)])
    batch.kl_baseline = 0.0
    assert set(kto(batch, batch.ref_logprobs).metrics) == {"kl_baseline", "desirable_logratio"}


def test_gradient_equals_finite_differences():
    gradient = assert_gradient_is_slope(kto, *good_and_bad(), beta=0.7)
    assert (gradient[0, 2:] < 0).all(), "a step makes the good reply more likely"
    assert (gradient[1, 2:4] > 0).all(), "and the bad one less"


def test_what_is_missing_is_refused():
    batch, logprobs = good_and_bad()
    batch.kl_baseline = None
    with pytest.raises(ConfigError, match="no `mismatched` ones"):
        kto(batch, logprobs)
    batch.kl_baseline, batch.ref_logprobs = 0.0, None
    with pytest.raises(ConfigError, match="ref_logprobs"):
        kto(batch, logprobs)


def labeled_samples(model, shift=0.0):
    """Siblings with labels, log-probs of a reference near the model's, and what estimates the KL.

    Args:
        model: The model.
        shift: How much more likely each token of a mismatched reply is under the model than under the reference.
    """
    samples, rng = sibling_samples(), np.random.default_rng(1)
    samples.sort(key=lambda sample: sample.token_ids[: int(sample.loss_mask.argmax())].tobytes())
    add_mismatched(samples)
    scored = add_mismatched_samples(samples)
    for number, (sample, logprobs) in enumerate(zip(scored, sample_logprobs(model, scored, 10_000), strict=True)):
        noise = rng.normal(0, 0.5, len(sample)) if number < len(samples) else -shift
        sample.ref_logprobs = (logprobs + np.where(sample.loss_mask, noise, 0)).astype(np.float32)
    for number, sample in enumerate(samples):
        sample.advantages = np.where(sample.loss_mask, (1.5, -0.5)[number % 2], 0).astype(np.float32)
    return samples


def test_the_baseline_is_the_weighted_mean_over_the_step_and_at_least_zero(tiny_model_dir):
    model = make_learner(tiny_model_dir).model
    samples = labeled_samples(model, shift=0.25)
    lengths = [sample.mismatched.num_trained for sample in samples]
    expected = 0.25 * np.average(lengths, weights=[sample.weight for sample in samples])
    for max_tokens in (1, 60, 10_000):
        assert estimate_kl(model, samples, max_tokens) == pytest.approx(expected, rel=1e-4)
    assert estimate_kl(model, labeled_samples(model, shift=-0.25), 10_000) == 0.0
    assert estimate_kl(model, [reply([5], [-1.0], 1.0)], 10_000) is None
    samples[0].mismatched.ref_logprobs = None
    with pytest.raises(EngineError, match="mismatched samples need ref_logprobs"):
        estimate_kl(model, samples, 10_000)


def test_a_baseline_of_each_micro_batch_would_show(tiny_model_dir, monkeypatch):
    """Mutation check: the baseline comes from the micro-batch instead of the step."""
    samples = labeled_samples(make_learner(tiny_model_dir).model, shift=0.25)
    expected, _ = step(make_learner(tiny_model_dir), samples, SPEC)
    found = find_loss(SPEC)
    learner = make_learner(tiny_model_dir, 60)
    by_tokens = {sample.token_ids.tobytes(): sample for sample in samples}

    def of_micro_batch(batch, logprobs_BT):
        rows = [row[:n].numpy().tobytes() for row, n in zip(batch.token_ids, batch.lengths.tolist(), strict=True)]
        batch.kl_baseline = estimate_kl(learner.model, [by_tokens[row] for row in rows], 10_000)
        return found(batch, logprobs_BT, **SPEC.params)

    mutated = learner.step(samples, of_micro_batch, 0.0)
    assert abs(mutated["loss"] - expected["loss"]) > 1e-4 * abs(expected["loss"])


def test_the_baseline_has_no_gradient(tiny_model_dir):
    """The gradient is that of the loss with the baseline held as a number."""
    samples = labeled_samples(make_learner(tiny_model_dir).model, shift=0.25)
    metrics, gradients = step(make_learner(tiny_model_dir), samples, SPEC)

    def with_number(batch, logprobs_BT):
        batch.kl_baseline = metrics["kl_baseline"]
        return kto(batch, logprobs_BT, **SPEC.params)

    learner = make_learner(tiny_model_dir)
    for sample in samples:
        sample.mismatched = None
    learner.step(samples, with_number, 0.0)
    for ours, theirs in zip(gradients, learner.optimizer.gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-6 * metrics["grad_norm"]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_baseline_that_is_not_finite_skips_the_step(tiny_model_dir, value):
    """An infinite one would make every sigmoid 0 or 1: a step of weight decay and momentum alone."""
    learner = make_learner(tiny_model_dir)
    samples = labeled_samples(learner.model)
    samples[0].mismatched.ref_logprobs[:] = value
    report = learner.update(samples, SPEC, JobProgress(0, 1))
    assert (report.num_updates, report.num_skipped_steps > 0) == (0, True)


def test_every_step_of_a_job_estimates_its_own_baseline(tiny_model_dir, monkeypatch):
    learner = make_learner(tiny_model_dir)
    learner.config.batch.steps_per_job = 3
    samples, sizes = labeled_samples(learner.model), []

    def count(chosen, compute):
        sizes.append(len(chosen))
        return sum_kl(chosen, compute)

    monkeypatch.setattr(kl_baseline, "sum_kl", count)
    learner.update(samples, KTO().loss, JobProgress(0, 1))
    assert len(sizes) == 3
    assert sum(sizes) == len(samples)
