"""ORPO and SimPO against arithmetic written here: odds, margins, length, saturation and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from reinforge.engine.losses.preference import MAX_MEAN_LOGPROB, orpo, simpo
from reinforge.engine.training.collate import collate
from reinforge.errors import TrajectoryError
from tests.core.numerics.test_preference_losses import member, minus_log_sigma


def one_pair():
    """The worse one comes first: mean log-probs -1.5 of two tokens and -0.6 of three; no reference."""
    samples = [member([5, 6], 0.0, [0.0, 0.0]), member([7, 8, 9], 1.0, [0.0, 0.0, 0.0])]
    for sample in samples:
        sample.ref_logprobs = None
    logprobs = torch.tensor([[0.0, 0.0, -2.0, -1.0, 0.0], [0.0, 0.0, -0.5, -0.6, -0.7]])
    return collate(samples), logprobs


CHOSEN, REJECTED = -0.6, -1.5


def log_odds(mean):
    p = math.exp(mean)
    return math.log(p / (1 - p))


def test_orpo_is_the_likelihood_plus_the_odds_ratio():
    batch, logprobs = one_pair()
    output = orpo(batch, logprobs, odds_ratio_coef=0.25)
    ratio = log_odds(CHOSEN) - log_odds(REJECTED)
    expected = -CHOSEN + 0.25 * minus_log_sigma(ratio)
    assert output.loss.tolist() == pytest.approx([expected, expected]), "both carry the loss of the pair"
    assert output.metrics["log_odds_ratio"].tolist() == pytest.approx([ratio] * 2)
    assert output.metrics["margin"].tolist() == pytest.approx([0.9, 0.9])
    assert output.metrics["chosen_logprob"].tolist() == pytest.approx([CHOSEN] * 2)
    assert output.metrics["pair_accuracy"].tolist() == [1.0, 1.0]


def test_equal_replies_have_an_odds_ratio_of_one():
    batch, _ = one_pair()
    same = torch.where(batch.loss_mask, -1.0, 0.0)
    assert orpo(batch, same, odds_ratio_coef=1.0).loss.tolist() == pytest.approx([1 + math.log(2)] * 2)


@pytest.mark.parametrize("mean", [0.0, -1e-9, -1e-4, -0.69, -0.7, -5.0, -80.0])
def test_orpo_is_finite_and_right_at_both_ends_of_the_odds(mean):
    """A preferred reply of probability 1 has infinite odds; of float32's 1 - e^m nothing would be left."""
    batch, logprobs = one_pair()
    start = torch.where(batch.loss_mask, mean, 0.0)
    start[0] = logprobs[0]
    start.requires_grad_()
    output = orpo(batch, start, odds_ratio_coef=1.0)
    odds = log_odds(min(mean, MAX_MEAN_LOGPROB))
    expected = -mean + minus_log_sigma(odds - log_odds(REJECTED)) if odds > -50 else -mean - odds + log_odds(REJECTED)
    assert output.loss[1].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    output.loss.sum().backward()
    assert start.grad.isfinite().all()


def test_simpo_is_the_logistic_loss_of_the_mean_logprobs():
    batch, logprobs = one_pair()
    output = simpo(batch, logprobs, beta=2.0, gamma=0.5)
    expected = minus_log_sigma(2 * (CHOSEN - REJECTED) - 0.5)
    assert output.loss.tolist() == pytest.approx([expected, expected])
    assert output.metrics["margin"].tolist() == pytest.approx([0.9, 0.9])
    assert output.metrics["rejected_logprob"].tolist() == pytest.approx([REJECTED] * 2)
    added = simpo(batch, logprobs, beta=2.0, gamma=0.5, sft_coef=0.3).loss[0].item()
    assert added == pytest.approx(expected + 0.3 * 0.6)


def test_a_longer_reply_is_not_preferred_for_its_length():
    """The same mean over 2 and 3 tokens: the margin is 0, where DPO's sums would differ by 1."""
    batch, _ = one_pair()
    same = torch.where(batch.loss_mask, -1.0, 0.0)
    assert simpo(batch, same, gamma=0.0).loss.tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize(
    ("loss", "params"), [(orpo, {"odds_ratio_coef": 0.7}), (simpo, {"beta": 2.5, "gamma": 1.6, "sft_coef": 0.5})]
)
def test_gradient_equals_finite_differences(loss, params):
    batch, logprobs = one_pair()
    start = logprobs.double().requires_grad_()
    loss(batch, start, **params).loss.mean().backward()
    for spot in batch.loss_mask.nonzero().tolist():
        step = torch.zeros_like(start)
        step[tuple(spot)] = 1e-5
        with torch.no_grad():
            up, down = (loss(batch, start + sign * step, **params).loss.mean() for sign in (1, -1))
        assert start.grad[tuple(spot)].item() == pytest.approx((up - down).item() / 2e-5, abs=1e-6)


def test_orpos_gradient_is_that_of_the_paper():
    """By mean log-prob: -1 - c d / (1 - P_w) of the preferred, c d / (1 - P_l) of the other, d = sigma(-ratio)."""
    batch, logprobs = one_pair()
    start = logprobs.double().requires_grad_()
    orpo(batch, start, odds_ratio_coef=0.25).loss[0].backward()
    d = 1 / (1 + math.exp(log_odds(CHOSEN) - log_odds(REJECTED)))
    chosen, rejected = -1 - 0.25 * d / (1 - math.exp(CHOSEN)), 0.25 * d / (1 - math.exp(REJECTED))
    assert start.grad[1, 2:].tolist() == pytest.approx([chosen / 3] * 3)
    assert start.grad[0, 2:4].tolist() == pytest.approx([rejected / 2] * 2)


@pytest.mark.parametrize("loss", [orpo, simpo])
def test_single_samples_are_refused(loss):
    batch = collate([member([5], 1.0, [0.0], pair=None)])
    with pytest.raises(TrajectoryError, match=f"{loss.__name__}: every sample must share its pair_id"):
        loss(batch, torch.zeros(1, 3))
