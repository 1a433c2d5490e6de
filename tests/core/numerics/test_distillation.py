"""The loss of on-policy distillation against arithmetic written here, and its gradient against the reverse KL's."""

import math

import pytest
import torch

from reinforge.engine.losses.policy_gradient import clipped_pg, distill
from reinforge.errors import ConfigError
from tests.core.numerics.test_losses import make_batch, row


def scored(sampled, teacher):
    batch = make_batch(sampled, [t - s for t, s in zip(teacher, sampled, strict=True)])
    batch.ref_logprobs = row(*teacher)
    return batch


def test_on_policy_the_loss_is_minus_the_advantage():
    """log p_teacher [-1, -3], log p_sampler [-2, -1]: advantages 1 and -2, divergences -1 and 2."""
    output = distill(scored([-2.0, -1.0], [-1.0, -3.0]), row(-2.0, -1.0))
    assert output.loss[0, 1:].tolist() == pytest.approx([-1.0, 2.0])
    assert output.metrics["teacher_kl"][0, 1:].tolist() == pytest.approx([-1.0, 2.0])


def test_off_policy_it_is_clipped_as_every_policy_gradient():
    batch, logprobs = scored([-2.0, -1.0], [-1.0, -3.0]), row(-2.0 + math.log(2), -1.0 - math.log(2))
    assert distill(batch, logprobs).loss.tolist() == clipped_pg(batch, logprobs).loss.tolist()
    assert distill(batch, logprobs).loss[0, 1:].tolist() == pytest.approx([-1.2, 0.8 * 2])


def test_its_gradient_is_that_of_the_reverse_kl():
    """One token of four, each weighed by its probability: d/dz KL(p, q) by finite differences, in float64."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.4], dtype=torch.float64), 0)

    def divergence(z):
        p = torch.log_softmax(z, 0)
        return (p.exp() * (p - teacher)).sum().item()

    start = logits.clone().requires_grad_()
    p = torch.log_softmax(start, 0)
    batch = scored(p.tolist(), teacher.tolist())
    padded = torch.cat([torch.zeros(1, dtype=torch.float64), p])[None]
    (distill(batch, padded).loss[0, 1:] * p.detach().exp()).sum().backward()
    for token in range(4):
        up, down = (logits + sign * 1e-5 * torch.eye(4, dtype=torch.float64)[token] for sign in (1, -1))
        assert start.grad[token].item() == pytest.approx((divergence(up) - divergence(down)) / 2e-5, rel=1e-4, abs=1e-6)


def test_a_batch_without_a_teacher_is_refused():
    with pytest.raises(ConfigError, match="no log-probs of a teacher"):
        distill(make_batch([-1.0], [1.0]), row(-1.0))
