"""DPO, IPO, ORPO and SimPO against arithmetic written here: pairs, smoothing, length, odds and refused input."""

import math

import pytest
import torch

from reinforge.engine.losses.preference import MAX_MEAN_LOGPROB, dpo, ipo, orpo, simpo
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


def one_pair(has_reference=True):
    """The worse one comes first: log-ratios -2 + 2.5 - 1 + 1 = 0.5 and -0.6 + 1 = 0.4 a token."""
    batch = collate([member([5, 6], 0.0, [-2.5, -1.0]), member([7, 8, 9], 1.0, [-1.0, -1.0, -1.0])])
    logprobs = torch.tensor([[0.0, 0.0, -2.0, -1.0, 0.0], [0.0, 0.0, -0.6, -0.6, -0.6]])
    if not has_reference:
        batch.ref_logprobs = None
    return batch, logprobs


CHOSEN, REJECTED = 3 * 0.4, 0.5
LIKELY, UNLIKELY = -0.6, -1.5
"""Log-ratios to the reference, and mean log-probs without one."""


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


def log_odds(mean):
    p = math.exp(mean)
    return math.log(p / (1 - p))


def test_orpo_is_the_likelihood_plus_the_odds_ratio():
    batch, logprobs = one_pair(has_reference=False)
    output = orpo(batch, logprobs, odds_ratio_coef=0.25)
    ratio = log_odds(LIKELY) - log_odds(UNLIKELY)
    expected = -LIKELY + 0.25 * minus_log_sigma(ratio)
    assert output.loss.tolist() == pytest.approx([expected, expected]), "both carry the loss of the pair"
    assert output.metrics["log_odds_ratio"].tolist() == pytest.approx([ratio] * 2)
    assert output.metrics["margin"].tolist() == pytest.approx([0.9, 0.9])
    assert output.metrics["chosen_logprob"].tolist() == pytest.approx([LIKELY] * 2)
    assert output.metrics["pair_accuracy"].tolist() == [1.0, 1.0]


def test_equal_replies_have_an_odds_ratio_of_one():
    batch, _ = one_pair(has_reference=False)
    same = torch.where(batch.loss_mask, -1.0, 0.0)
    assert orpo(batch, same, odds_ratio_coef=1.0).loss.tolist() == pytest.approx([1 + math.log(2)] * 2)


@pytest.mark.parametrize("mean", [0.0, -1e-9, -1e-4, -0.69, -0.7, -5.0, -80.0])
def test_orpo_is_finite_and_right_at_both_ends_of_the_odds(mean):
    """A preferred reply of probability 1 has infinite odds; of float32's 1 - e^m nothing would be left."""
    batch, logprobs = one_pair(has_reference=False)
    start = torch.where(batch.loss_mask, mean, 0.0)
    start[0] = logprobs[0]
    start.requires_grad_()
    output = orpo(batch, start, odds_ratio_coef=1.0)
    odds = log_odds(min(mean, MAX_MEAN_LOGPROB))
    expected = -mean + minus_log_sigma(odds - log_odds(UNLIKELY)) if odds > -50 else -mean - odds + log_odds(UNLIKELY)
    assert output.loss[1].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    output.loss.sum().backward()
    assert start.grad.isfinite().all()


def test_simpo_is_the_logistic_loss_of_the_mean_logprobs():
    batch, logprobs = one_pair(has_reference=False)
    output = simpo(batch, logprobs, beta=2.0, gamma=0.5)
    expected = minus_log_sigma(2 * (LIKELY - UNLIKELY) - 0.5)
    assert output.loss.tolist() == pytest.approx([expected, expected])
    assert output.metrics["margin"].tolist() == pytest.approx([0.9, 0.9])
    assert output.metrics["rejected_logprob"].tolist() == pytest.approx([UNLIKELY] * 2)
    added = simpo(batch, logprobs, beta=2.0, gamma=0.5, sft_coef=0.3).loss[0].item()
    assert added == pytest.approx(expected + 0.3 * 0.6)


def test_a_longer_reply_is_not_preferred_for_its_length():
    """The same mean over 2 and 3 tokens: the margin is 0, where DPO's sums would differ by 1."""
    batch, _ = one_pair(has_reference=False)
    same = torch.where(batch.loss_mask, -1.0, 0.0)
    assert simpo(batch, same, gamma=0.0).loss.tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("loss", [orpo, simpo])
def test_single_samples_are_refused(loss):
    batch = collate([member([5], 1.0, [0.0], pair=None)])
    with pytest.raises(TrajectoryError, match=f"{loss.__name__}: every sample must share its pair_id"):
        loss(batch, torch.zeros(1, 3))
