"""GSPO, CISPO, dual clip, constant length and the KL estimators against arithmetic written here, on and off policy."""

import math

import numpy as np
import pytest

from reinforge.engine import Engine
from reinforge.engine.losses.base import kl_to_reference
from reinforge.engine.losses.policy_gradient import cispo, clipped_pg, gspo, sapo
from reinforge.errors import ConfigError
from reinforge.types.sample import LossSpec, Needs
from tests.core.numerics.test_losses import make_batch, row
from tests.engines import load_engine, train
from tests.samples import random_samples

HALF, DOUBLE = math.log(0.5), math.log(2.0)


def gradient(loss, batch, logprobs, **params):
    """The gradient of the summed loss by each token's log-prob."""
    start = logprobs.clone().requires_grad_()
    loss(batch, start, **params).loss.sum().backward()
    return start.grad[0, 1:].tolist()


@pytest.mark.parametrize(("ratio", "expected"), [(1.1, 2.2), (2.0, 4.0), (5.0, 6.0), (0.5, 1.6)])
def test_dual_clip_bounds_a_negative_advantage(ratio, expected):
    """A = -2, clip 0.2, dual clip 3: 2 r up to 2 x 3; below, at 0.8."""
    output = clipped_pg(make_batch([-1.0], [-2.0]), row(-1.0 + math.log(ratio)), dual_clip=3.0)
    assert output.loss[0, 1].item() == pytest.approx(expected, abs=1e-5)
    assert output.metrics["dual_clip_fraction"][0, 1].item() == float(ratio > 3)


def test_dual_clip_leaves_positive_advantages_alone():
    for ratio in (0.1, 1.0, 5.0):
        batch, logprobs = make_batch([-1.0], [2.0]), row(-1.0 + math.log(ratio))
        assert clipped_pg(batch, logprobs, dual_clip=3.0).loss.tolist() == clipped_pg(batch, logprobs).loss.tolist()


@pytest.mark.parametrize(
    ("loss", "params", "values"),
    [
        (clipped_pg, {}, [-0.7, 0.3]),
        (gspo, {}, [-0.7, 0.3]),
        (cispo, {}, [0.7, -0.6]),  # the log-probs times the advantages
        (sapo, {"tau_pos": 2.0, "tau_neg": 4.0}, [-0.7, 0.15]),  # -2 A / tau, since sigma(0) = 1/2
    ],
)
def test_on_policy_every_loss_is_reinforce(loss, params, values):
    batch, logprobs = make_batch([-1.0, -2.0], [0.7, -0.3]), row(-1.0, -2.0)
    assert loss(batch, logprobs, **params).loss[0, 1:].tolist() == pytest.approx(values)
    assert gradient(loss, batch, logprobs, **params) == pytest.approx([-0.7, 0.3])


def test_constant_length_divides_the_sum_of_a_sample():
    """Off policy: ratios 2, 1, 0.5 with A = 1 -> gains 1.2, 1, 0.5; 2.7 / 10 whatever the sample's length."""
    batch = make_batch([-1.0, -1.0, -1.0], [1.0, 1.0, 1.0])
    output = clipped_pg(batch, row(-1 + DOUBLE, -1.0, -1 + HALF), constant_length=10)
    assert output.loss.tolist() == pytest.approx([-0.27])
    batch.loss_mask[0, 2] = False
    assert clipped_pg(batch, row(-1 + DOUBLE, -1.0, -1 + HALF), constant_length=10).loss.tolist() == pytest.approx(
        [-0.17]
    )


def test_gspo_off_policy_weighs_every_token_by_the_sequences_ratio():
    """Ratios 2, 0.5 and 4: s = (2 x 0.5 x 4)^(1/3) = 4^(1/3) = 1.587, whichever token moved."""
    batch, logprobs = make_batch([-2.0, -2.0, -2.0], [-1.0, -1.0, -1.0]), row(-2 + DOUBLE, -2 + HALF, -2 + 2 * DOUBLE)
    s = 4 ** (1 / 3)
    output = gspo(batch, logprobs, clip_low=0.2, clip_high=0.2)
    assert output.loss[0, 1:].tolist() == pytest.approx([s, s, s])
    assert output.metrics["ratio"][0, 1:].tolist() == pytest.approx([s, s, s])
    assert gradient(gspo, batch, logprobs, clip_low=0.2, clip_high=0.2) == pytest.approx([s, s, s])


def test_gspo_clips_whole_sequences():
    """s = 1.587 > 1.2 with a gain: the whole sequence stops, though one token's ratio is 0.5."""
    batch, logprobs = make_batch([-2.0, -2.0, -2.0], [1.0, 1.0, 1.0]), row(-2 + DOUBLE, -2 + HALF, -2 + 2 * DOUBLE)
    output = gspo(batch, logprobs, clip_low=0.2, clip_high=0.2)
    assert output.loss[0, 1:].tolist() == pytest.approx([-1.2] * 3)
    assert output.metrics["clip_fraction"][0, 1:].tolist() == [1.0] * 3
    assert gradient(gspo, batch, logprobs, clip_low=0.2, clip_high=0.2) == [0.0] * 3
    token = clipped_pg(batch, logprobs).metrics["clip_fraction"][0, 1:].tolist()
    assert token == [1.0, 0.0, 1.0], "GRPO would let the second token go on"


def test_cispo_off_policy_limits_weights_and_every_token_has_a_gradient():
    """Ratios 2, 8 and 0.5, A = 1, weights up to 5: each token keeps a gradient, where GRPO's clip leaves one."""
    batch, logprobs = make_batch([-4.0, -4.0, -4.0], [1.0, 1.0, 1.0]), row(-4 + DOUBLE, -4 + 3 * DOUBLE, -4 + HALF)
    output = cispo(batch, logprobs)
    assert output.loss[0, 1:].tolist() == pytest.approx([2 * (4 - DOUBLE), 5 * (4 - 3 * DOUBLE), 0.5 * (4 + DOUBLE)])
    assert gradient(cispo, batch, logprobs) == pytest.approx([-2, -5, -0.5])
    assert gradient(clipped_pg, batch, logprobs) == pytest.approx([0, 0, -0.5])
    assert output.metrics["clip_fraction"][0, 1:].tolist() == [0, 1, 0]
    ends = cispo(batch, logprobs, clip_low=0.2).metrics
    assert [ends[f"clip_fraction_{end}"][0, 1:].tolist() for end in ("low", "high")] == [[0, 0, 1], [0, 1, 0]]
    assert gradient(cispo, batch, logprobs, clip_low=0.2) == pytest.approx([-2, -5, -0.8])


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_off_policy_fades_to_both_sides(advantage, tau):
    """Ratios 2 and 0.5: A 4 / tau sigma(tau (r - 1)), and the ratio's gradient times 4 p (1 - p)."""
    batch, logprobs = make_batch([-4.0, -4.0], [advantage] * 2), row(-4 + DOUBLE, -4 + HALF)
    p = [1 / (1 + math.exp(-tau * (ratio - 1))) for ratio in (2, 0.5)]
    output = sapo(batch, logprobs)
    assert output.loss[0, 1:].tolist() == pytest.approx([-4 / tau * each * advantage for each in p])
    gates = [4 * each * (1 - each) for each in p]
    assert output.metrics["gate"][0, 1:].tolist() == pytest.approx(gates)
    wanted = [-gate * ratio * advantage for gate, ratio in zip(gates, (2, 0.5), strict=True)]
    assert gradient(sapo, batch, logprobs) == pytest.approx(wanted)
    assert "clip_fraction" not in output.metrics


def make_mismatched_batch(old, offsets, advantages, ref=None):
    batch = make_batch(old, advantages, ref)
    batch.sampling_logprobs = row(*(o - offset for o, offset in zip(old, offsets, strict=True)))
    batch.old_logprobs_from_learner = True
    return batch


MISMATCHED = {"old": [-1.0, -1.0, -1.0], "offsets": [0.05, -0.05, 1.0], "advantages": [2.0, 2.0, -2.0]}
"""Tokens that the sampler underestimated, overestimated and strongly underestimated."""


@pytest.mark.parametrize("loss", [clipped_pg, cispo, sapo])
def test_tokens_that_the_sampler_underestimated_get_more_weight(loss):
    """e^0.05 and e^-0.05 of the gradient, and of the third 2, since e^1 is above the cap."""
    batch, logprobs = make_mismatched_batch(**MISMATCHED), row(-1.0, -1.0, -1.0)
    weights = [math.exp(0.05), math.exp(-0.05), 2.0]
    wanted = [-2 * weights[0], -2 * weights[1], 2 * weights[2]]
    assert gradient(loss, batch, logprobs) == pytest.approx(wanted)
    assert loss(batch, logprobs).metrics["tis_weight"][0, 1:].tolist() == pytest.approx(weights)
    assert gradient(loss, batch, logprobs, tis_cap=1.0) == pytest.approx([-2.0, -2 * weights[1], 2.0])
    assert gradient(loss, batch, logprobs, tis_cap=None) == pytest.approx([-2.0, -2.0, 2.0])


def test_off_policy_the_clip_uses_the_learners_logprobs_and_the_weight_the_samplers():
    """Ratio 1.5 with a gain of 1: min(1.5, 1.2) e^0.05."""
    batch = make_mismatched_batch([-1.0], [0.05], [1.0])
    output = clipped_pg(batch, row(-1.0 + math.log(1.5)))
    assert output.loss[0, 1].item() == pytest.approx(-1.2 * math.exp(0.05))


def test_gspo_weighs_the_whole_sequence():
    """Offsets 0.05, -0.05 and 1: e^(1/3) for each of its tokens; capped at 1.2 for each of them."""
    batch, logprobs = make_mismatched_batch(**MISMATCHED), row(-1.0, -1.0, -1.0)
    weight = math.exp(1 / 3)
    assert gradient(gspo, batch, logprobs) == pytest.approx([-2 * weight, -2 * weight, 2 * weight])
    assert gradient(gspo, batch, logprobs, tis_cap=1.2) == pytest.approx([-2.4, -2.4, 2.4])


def test_only_the_policy_term_is_weighted_and_only_with_learner_logprobs():
    """The KL penalty is unchanged; k2 of 0.5 is 0.125."""
    batch = make_mismatched_batch([-1.0], [0.05], [2.0], ref=[-1.5])
    output = clipped_pg(batch, row(-1.0), kl_coef=1.0, kl_estimator="k2")
    assert output.loss[0, 1].item() == pytest.approx(-2 * math.exp(0.05) + 0.125)
    batch.sampling_logprobs = row(math.nan)  # not sampled
    assert clipped_pg(batch, row(-1.0)).loss[0, 1].item() == pytest.approx(-2.0)
    batch = make_mismatched_batch([-1.0], [0.05], [2.0])
    batch.old_logprobs_from_learner = False
    output = clipped_pg(batch, row(-1.0))
    assert output.loss[0, 1].item() == -2.0
    assert "tis_weight" not in output.metrics


def test_the_three_estimators_by_hand():
    batch = make_batch([-1.0], [0.0], ref=[-1.5])
    for name, expected in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)):
        assert kl_to_reference(batch, row(-1.0), name)[0, 1].item() == pytest.approx(expected, abs=1e-7)
        output = clipped_pg(batch, row(-1.0), kl_coef=0.1, kl_estimator=name)
        assert output.loss[0, 1].item() == pytest.approx(0.1 * expected, abs=1e-7)
        assert output.metrics["kl_ref"][0, 1].item() == pytest.approx(expected, abs=1e-7)
    with pytest.raises(ConfigError, match='unknown KL estimator "k4"'):
        kl_to_reference(batch, row(-1.0), "k4")


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


@pytest.mark.parametrize("by_learner", [True, pytest.param(False, marks=pytest.mark.slow)])
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
