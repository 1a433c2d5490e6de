"""Each loss through the whole learner: its gradient does not depend on micro-batches, prefixes or order."""

from functools import cache

import numpy as np
import pytest
import torch

from reinforge.engine.losses.base import find_loss
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.collate import collate
from reinforge.engine.training.learner import JobProgress
from reinforge.engine.training.logprobs import sample_logprobs, token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.shared_prefix import make_sharing_masks
from reinforge.types.sample import LossSpec
from tests.engines import copy_weights
from tests.engines import make_learner as make
from tests.samples import sibling_samples

KL = {"kl_coef": 0.1, "entropy_coef": 0.01}
LOSSES = {
    "grpo": LossSpec("clipped_pg", {"clip_high": 0.28, "dual_clip": 3.0, **KL}),
    "dr_grpo": LossSpec("clipped_pg", {"constant_length": 16, "kl_estimator": "k2", **KL}),
    "gspo": LossSpec("gspo", {"clip_low": 0.1, "clip_high": 0.1, **KL}),
    "cispo": LossSpec("cispo", {"clip_high": 0.3, **KL}),
    "dpo": LossSpec("dpo", {"beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.5}),
    "dpo_by_length": LossSpec("dpo", {"length_normalized": True}),
    "ipo": LossSpec("ipo", {"beta": 0.2}),
    "orpo": LossSpec("orpo", {"odds_ratio_coef": 0.5}),
    "sapo": LossSpec("sapo", {"tau_neg": 1.5, **KL}),
    "simpo": LossSpec("simpo", {"sft_coef": 0.2}),
}
PAIRED = {"dpo", "dpo_by_length", "ipo", "orpo", "simpo"}
WITHOUT_VALUE = {"cispo"}
"""Losses with a stopped gradient are not the integral of their gradient."""


class RecordingOptimizer:
    def __init__(self, parameters):
        self.parameters, self.param_groups, self.gradients = list(parameters), [{"peak": 0.0}], []

    def step(self):
        self.gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None


@cache
def load_once(folder):
    return load_module(folder, torch.float64)


def make_learner(folder, max_tokens=100_000, share=False):
    """A learner whose steps change no weight, so that all learners of a folder have one module."""
    batch, optimizer = {"micro_batch_tokens": max_tokens}, {"max_grad_norm": 1e9}
    learner = make(load_once(folder), batch=batch, optimizer=optimizer)
    learner.masks = make_sharing_masks(learner.model) if share else None
    learner.optimizer = RecordingOptimizer(learner.parameters.values())
    return learner


def off_policy_samples(folder, name):
    """Siblings with old log-probs near the model's, a different reference, and pairs for preference losses."""
    samples = sibling_samples()
    rng = np.random.default_rng(1)
    for sample, logprobs in zip(samples, sample_logprobs(make_learner(folder).model, samples, 10_000), strict=True):
        noise = [np.where(sample.loss_mask, rng.normal(0, scale, len(sample)), 0) for scale in (0.3, 0.5)]
        sample.old_logprobs, sample.ref_logprobs = ((logprobs + n).astype(np.float32) for n in noise)
    if name not in PAIRED:
        return samples
    by_prompt: dict[tuple, list] = {}
    for sample in samples:
        by_prompt.setdefault(tuple(sample.token_ids[: int(sample.loss_mask.argmax())]), []).append(sample)
    pairs = [members[i : i + 2] for members in by_prompt.values() for i in range(0, len(members) - 1, 2)]
    for number, members in enumerate(pairs):
        for reward, member in zip((1.0, 0.0), members, strict=True):
            member.pair_id, member.reward, member.weight = f"p{number}", reward, 1.0
    return [sample for sample in samples if sample.pair_id]


def step(learner, samples, spec):
    loss = find_loss(spec)
    metrics = learner.step(samples, lambda *a: loss(*a, **spec.params), 0.0, entropy_grad="entropy_coef" in spec.params)
    return metrics, learner.optimizer.gradients


QUICK = ("grpo", "dpo")
"""One loss of a number for each token, and one of a number for each pair."""


def each_loss(names):
    return pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@each_loss(LOSSES)
def test_how_a_step_is_computed_changes_nothing(tiny_model_dir, name):
    """One batch or many, prefixes shared or not, any order: the same loss, metrics and gradient."""
    samples = off_policy_samples(tiny_model_dir, name)
    expected, gradients = step(make_learner(tiny_model_dir), samples, LOSSES[name])
    order = np.random.default_rng(2).permutation(len(samples))
    mixed = [samples[i] for i in order]
    for max_tokens, share, chosen in (
        (1, False, samples),
        (60, False, mixed),
        (60, True, mixed),
        (9999, True, samples),
    ):
        assert len(make_micro_batches(chosen, max_tokens, share=share)) > 1 or max_tokens > 1000
        found, others = step(make_learner(tiny_model_dir, max_tokens, share), chosen, LOSSES[name])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
        for ours, theirs in zip(others, gradients, strict=True):
            assert (ours - theirs).abs().max() < 1e-7 * expected["grad_norm"]


@pytest.mark.parametrize("name", ["dr_grpo", "dpo"])
def test_a_loss_of_one_number_a_sample_is_a_weighted_mean_over_samples(tiny_model_dir, name):
    """sum_s w_s l_s / sum_s w_s over the whole step, whatever the micro-batches; metrics of samples are plain means."""
    samples = off_policy_samples(tiny_model_dir, name)
    learner = make_learner(tiny_model_dir, 60)
    found, _ = step(learner, samples, LOSSES[name])
    batch = collate(samples)
    logprobs, batch.entropies = token_logprobs(learner.model, batch)
    output = find_loss(LOSSES[name])(batch, logprobs, **LOSSES[name].params)
    weights, losses = [sample.weight for sample in samples], output.loss.tolist()
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert found["loss"] == pytest.approx(total / sum(weights), rel=1e-6)
    if name == "dpo":
        assert found["margin"] == pytest.approx(sum(output.metrics["margin"].tolist()) / len(samples), rel=1e-6)
    else:
        assert len(set(weights)) > 1, "weights that differ, or this shows nothing"


@each_loss(sorted(set(LOSSES) - WITHOUT_VALUE))
def test_the_gradient_is_the_slope_of_the_loss(tiny_model_dir, name):
    """Along the gradient the loss of the whole step rises by the gradient's norm."""
    samples = off_policy_samples(tiny_model_dir, name)
    learner = make_learner(tiny_model_dir, 60, share=True)
    metrics, gradients = step(learner, samples, LOSSES[name])
    losses, before = [], copy_weights(learner)
    for size in (1e-4, -1e-4, 0.0):
        with torch.no_grad():
            for (path, parameter), gradient in zip(learner.parameters.items(), gradients, strict=True):
                parameter.copy_(before[path] + size * gradient / metrics["grad_norm"])
        losses.append(step(learner, samples, LOSSES[name])[0]["loss"])
    slope = (losses[0] - losses[1]) / 2e-4
    assert slope == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_pairs_are_never_split_between_steps(tiny_model_dir):
    samples = off_policy_samples(tiny_model_dir, "dpo")
    learner = make_learner(tiny_model_dir)
    learner.config.batch.steps_per_job, learner.config.batch.num_iterations = 3, 2
    plan = learner.plan_steps(samples, epoch=0)
    assert len(plan) == 6
    for indices in plan:
        ids = [samples[i].pair_id for i in indices]
        assert sorted(ids) == sorted(2 * list(set(ids)))
    assert learner.update(samples, LOSSES["dpo"], JobProgress(0, 1)).num_updates == 6
