"""One step, one gradient: micro-batches, shared prefixes, padding and order change it by rounding alone.

Hypothesis draws the shapes: families of siblings, lengths, turns in between, weights. For a loss of each kind: by
token, by sample, by pair, with a critic, with the KL of the whole step, and without any credit.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reinforge.algorithms.kto import add_mismatched
from reinforge.config.policy import BatchConfig, PolicyConfig
from reinforge.engine.losses.base import find_loss
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.learner import Learner
from reinforge.engine.training.shared_prefix import make_sharing_masks
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec
from tests.core.numerics.test_whole_path import RecordingOptimizer
from tests.samples import make_sample

RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Tolerances, relative to the gradient's norm and to each of its numbers, for rounding in float32."""

LOSSES = {
    "token": LossSpec("clipped_pg", {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.01}),
    "no credit": LossSpec("cross_entropy"),
    "sample by token": LossSpec("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    "sample": LossSpec("clipped_pg", {"constant_length": 16, "kl_coef": 0.1}),
    "pair": LossSpec("dpo", {"beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.5}),
    "critic": LossSpec("ppo", {"value_clip": 0.2}),
    "critic alone": LossSpec("ppo", {"value_clip": 0.2}),
    "whole step": LossSpec("kto", {"beta": 0.3}),
}
FIELDS = (
    "token_ids", "loss_mask", "sampling_logprobs", "temperatures", "policy_versions", "turn_ids", "advantages",
    "old_logprobs", "ref_logprobs", "returns", "values",
)  # fmt: skip


@pytest.fixture(scope="module")
def learners(tiny_model_dir):
    """Makes two learners of the same weights, with a critic that is not zero: one shares prefixes, the other does not.

    The critic's gradient reaches the model, or not.
    """

    def make(shares, shares_trunk):
        model = CausalModel(load_module(tiny_model_dir, torch.float32))
        critic = ValueHead(model, shares_trunk=shares_trunk)
        with torch.no_grad():
            critic.weight.copy_(torch.linspace(-1, 1, 64))
        config = PolicyConfig(batch=BatchConfig())
        config.optimizer.max_grad_norm = 1e9
        learner = Learner(model, config, 0, make_sharing_masks(model) if shares else None, critic)
        learner.optimizer = RecordingOptimizer(learner.parameters.values())
        return learner

    return cache(lambda shares_trunk=True: {shares: make(shares, shares_trunk) for shares in (False, True)})


@st.composite
def steps(draw, paired=False, mismatched=False):
    """The samples of one step: families of siblings, some with an untrained turn between their replies."""
    families = draw(st.lists(st.tuples(st.integers(1, 24), st.integers(1, 5)), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for family, (length, size) in enumerate(families):
        prompt = tuple(rng.integers(6, 320, length).tolist())
        for number in range(2 * size if paired else size):
            reply = tuple(rng.integers(6, 320, rng.integers(1, 9)).tolist())
            logprobs = tuple(rng.uniform(-7, -4, len(reply)).tolist())
            tokens = TokenLogprobs(prompt, reply, logprobs, temperature=float(rng.choice([0.7, 1.0])))
            sample = make_sample(tokens, float(rng.normal()), float(rng.uniform(0.2, 2)))
            if len(reply) > 2 and rng.random() < 0.3:
                sample.loss_mask[len(prompt) + 1] = False
            for field in ("old_logprobs", "ref_logprobs", "returns", "values"):
                noise = rng.normal(0 if field in ("returns", "values") else -5.5, 0.5, len(sample))
                setattr(sample, field, np.where(sample.loss_mask, noise, 0).astype(np.float32))
            if paired:
                sample.pair_id, sample.reward, sample.weight = f"{family}/{number // 2}", float(number % 2), 1.0
            samples.append(sample)
    if mismatched:
        add_mismatched(samples)
        for sample in samples:
            noise = rng.normal(-6.5, 0.5, len(sample.mismatched))  # less likely than now, so the baseline is above 0
            sample.mismatched.ref_logprobs = np.where(sample.mismatched.loss_mask, noise, 0).astype(np.float32)
    return samples


def gradient_of(learner, samples, spec, max_tokens=100_000):
    learner.micro_batch_tokens, loss = max_tokens, find_loss(spec)
    entropy = "entropy_coef" in spec.params
    metrics = learner.step(samples, lambda *a: loss(*a, **spec.params), 0.0, entropy_grad=entropy)
    return torch.cat([gradient.flatten() for gradient in learner.optimizer.gradients]), metrics["loss"]


def longer(samples, count):
    """Returns samples with untrained tokens appended, so that all rows get more padding."""

    def add(array):
        return None if array is None else np.concatenate([array, np.zeros(count, array.dtype)])

    return [replace(sample, **{field: add(getattr(sample, field)) for field in FIELDS}) for sample in samples]


def worst(learners, samples, spec, max_tokens, order, num_added):
    """Returns the largest difference to one batch of rows, as a share of what is allowed."""
    expected, loss = gradient_of(learners[False], samples, spec)
    mixed = [samples[i] for i in order.permutation(len(samples))]
    allowed = RELATIVE * expected.norm().item() + ABSOLUTE
    shares = []
    for chosen, share, tokens in (
        (samples, False, max_tokens),
        (mixed, False, max_tokens),
        (mixed, True, max_tokens),
        (samples, True, 100_000),
        (longer(samples, num_added), False, 100_000),
        (longer(mixed, num_added), True, max_tokens),
    ):
        found, other = gradient_of(learners[share], chosen, spec, tokens)
        shares.append(((found - expected).abs().max().item() / allowed, abs(other - loss) / (1e-4 * abs(loss) + 1e-5)))
    return max(max(pair) for pair in shares)


LOSS_KINDS = [("critic", 2), *(pytest.param(kind, 8, marks=pytest.mark.slow) for kind in LOSSES)]


@pytest.mark.parametrize(("kind", "count"), LOSS_KINDS)
def test_how_a_step_is_computed_changes_its_gradient_by_rounding_alone(learners, kind, count):
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        samples=steps(paired=kind == "pair", mismatched=kind == "whole step"),
        tokens=st.integers(1, 120),
        seed=st.integers(0, 99),
        added=st.integers(1, 9),
    )
    def check(samples, tokens, seed, added):
        pair = learners(kind != "critic alone")
        assert worst(pair, samples, LOSSES[kind], tokens, np.random.default_rng(seed), added) <= 1

    check()


class IgnoresOtherMicroBatches(Learner):
    def _try_gradients(self, samples, own, *arguments, **options):
        for indices in self._micro_batches(own):
            part = [own[i] for i in indices]
            sums = super()._try_gradients(part, part, *arguments, **options)
        return sums


def test_a_step_that_depends_on_its_micro_batches_shows(learners):
    """Mutation check."""
    before = learners()[False]
    mutated = IgnoresOtherMicroBatches(before.model, before.config, 0, None, before.critic)
    mutated.optimizer = RecordingOptimizer(mutated.parameters.values())
    rng = np.random.default_rng(0)
    samples = [make_sample(TokenLogprobs((7, 8, 9), (10 + i, 20) * (1 + i), (-5.0,) * 2 * (1 + i))) for i in range(6)]
    assert worst({False: mutated, True: mutated}, samples, LOSSES["no credit"], 10, rng, 3) > 1


def test_padding_that_is_trained_shows(learners):
    """Mutation check."""
    samples = [make_sample(TokenLogprobs((7, 8, 9), (10 + i, 20), (-5.0, -5.0))) for i in range(3)]
    expected, _ = gradient_of(learners()[False], samples, LOSSES["no credit"])
    padded = longer(samples, 2)
    for sample in padded:
        sample.loss_mask[-1] = True
    found, _ = gradient_of(learners()[False], padded, LOSSES["no credit"])
    assert (found - expected).abs().max() > RELATIVE * expected.norm() + ABSOLUTE
