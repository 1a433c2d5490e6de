"""DPO and IPO against arithmetic written here: pairs, smoothing, SFT term, length and refused input."""

from __future__ import annotations

import math

import pytest
import torch

from reinforge.engine.losses.preference import dpo, ipo
from reinforge.engine.training.collate import collate
from reinforge.errors import ConfigError, TrajectoryError
from reinforge.types.request import TokenLogprobs
from tests.samples import make_sample


def member(ids, reward, ref, pair="p"):
    """A sample of prompt [1, 2] and these replies, with reference log-probs."""
    sample = make_sample(TokenLogprobs((1, 2), tuple(ids), (-1.0,) * len(ids)))
    sample.reward, sample.pair_id = reward, pair
    sample.ref_logprobs = sample.sampling_logprobs.copy()
    sample.ref_logprobs[sample.loss_mask] = ref
    return sample


def one_pair():
    """The worse one comes first: log-ratios -2 + 2.5 - 1 + 1 = 0.5 and -0.6 + 1 = 0.4 a token."""
    batch = collate([member([5, 6], 0.0, [-2.5, -1.0]), member([7, 8, 9], 1.0, [-1.0, -1.0, -1.0])])
    logprobs = torch.tensor([[0.0, 0.0, -2.0, -1.0, 0.0], [0.0, 0.0, -0.6, -0.6, -0.6]])
    return batch, logprobs


CHOSEN, REJECTED = 3 * 0.4, 0.5


def minus_log_sigma(x):
    return math.log1p(math.exp(-x))


def test_of_a_pair_the_sample_with_the_higher_reward_is_preferred():
    assert one_pair()[0].pairs.tolist() == [[1, 0]]


def test_dpo_is_the_logistic_loss_of_the_margin():
    batch, logprobs = one_pair()
    output = dpo(batch, logprobs, beta=0.3)
    expected = minus_log_sigma(0.3 * (CHOSEN - REJECTED))
    assert output.loss.tolist() == pytest.approx([expected, expected]), "both carry the loss of the pair"
    assert output.metrics["margin"].tolist() == pytest.approx([CHOSEN - REJECTED] * 2)
    assert output.metrics["chosen_logratio"].tolist() == pytest.approx([CHOSEN] * 2)
    assert output.metrics["pair_accuracy"].tolist() == [1.0, 1.0]


def test_at_the_reference_dpo_is_log_two():
    batch, _ = one_pair()
    assert dpo(batch, batch.ref_logprobs).loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_label_smoothing_assumes_that_some_pairs_are_mislabeled():
    batch, logprobs = one_pair()
    x = 0.3 * (CHOSEN - REJECTED)
    expected = 0.9 * minus_log_sigma(x) + 0.1 * minus_log_sigma(-x)
    assert dpo(batch, logprobs, beta=0.3, label_smoothing=0.1).loss[0].item() == pytest.approx(expected)


def test_the_sft_term_is_the_preferred_ones_mean_likelihood():
    batch, logprobs = one_pair()
    output = dpo(batch, logprobs, beta=0.3, sft_coef=2.0)
    assert output.loss[0].item() == pytest.approx(minus_log_sigma(0.3 * (CHOSEN - REJECTED)) + 2 * 0.6)
    assert output.metrics["chosen_nll"].tolist() == pytest.approx([0.6, 0.6])


def test_the_length_normalized_form_compares_means():
    batch, logprobs = one_pair()
    output = dpo(batch, logprobs, beta=5.0, length_normalized=True)
    assert output.loss[0].item() == pytest.approx(minus_log_sigma(5 * (0.4 - 0.25)))


def test_ipo_is_the_squared_distance_from_its_target():
    batch, logprobs = one_pair()
    assert ipo(batch, logprobs, beta=0.1).loss.tolist() == pytest.approx([(0.7 - 5) ** 2] * 2, rel=1e-5)
    assert ipo(batch, logprobs, beta=1.0, length_normalized=True).loss[0].item() == pytest.approx((0.15 - 0.5) ** 2)


@pytest.mark.parametrize(("loss", "params"), [(dpo, {"label_smoothing": 0.2, "sft_coef": 0.5}), (ipo, {})])
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


def test_two_pairs_are_kept_apart():
    samples = [member([5], 0.0, [-1.0], "a"), member([6], 2.0, [-1.0], "b"), member([7], 1.0, [-1.0], "a")]
    batch = collate([*samples, member([8], 1.0, [-1.0], "b")])
    assert batch.pairs.tolist() == [[2, 0], [1, 3]]
    logprobs = torch.tensor([[0.0, 0.0, -1.5], [0.0, 0.0, -1.0], [0.0, 0.0, -1.0], [0.0, 0.0, -3.0]])
    assert dpo(batch, logprobs).metrics["margin"].tolist() == pytest.approx([0.5, 2.0, 0.5, 2.0])


def test_invalid_pairs_are_refused():
    lonely = collate([member([5], 0.0, [-1.0], "a"), member([6], 1.0, [-1.0], "a"), member([7], 1.0, [-1.0], "b")])
    with pytest.raises(TrajectoryError, match="dpo: every sample must share its pair_id"):
        dpo(lonely, lonely.ref_logprobs)
    message = r'pair "a" must be two samples with different rewards, but has \[1.0, 1.0\]'
    with pytest.raises(TrajectoryError, match=message):
        collate([member([5], 1.0, [-1.0], "a"), member([6], 1.0, [-1.0], "a")])
    batch, logprobs = one_pair()
    batch.ref_logprobs = None
    with pytest.raises(ConfigError, match="ref_logprobs"):
        ipo(batch, logprobs)
