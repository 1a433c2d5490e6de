"""Each loss against arithmetic written here, on and off policy, and its gradient against finite differences."""

import math

import numpy as np
import pytest
import torch

from reinforge.engine.losses.base import LossOutput, cross_entropy, find_loss, register_loss
from reinforge.engine.losses.policy_gradient import clipped_pg
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError
from reinforge.types.sample import LossSpec


def make_batch(old: list[float], advantages: list[float], ref: list[float] | None = None) -> TokenBatch:
    """One row: a prompt token, then a trained token for each entry."""
    n = len(old) + 1

    def row(values: list[float]) -> torch.Tensor:
        return torch.tensor([[0.0, *values]])

    return TokenBatch(
        token_ids=torch.arange(n)[None],
        lengths=torch.tensor([n]),
        loss_mask=torch.tensor([[False] + [True] * len(old)]),
        temperatures=torch.ones(1, n),
        sampling_logprobs=row(old),
        old_logprobs=row(old),
        ref_logprobs=None if ref is None else row(ref),
        advantages=row(advantages),
        weights=torch.ones(1),
    )


def row(*values: float) -> torch.Tensor:
    return torch.tensor([[0.0, *values]])


def assert_gradient_is_slope(loss, batch, logprobs, **params):
    """Compares the gradient of the mean loss with finite differences at each trained token, and returns it."""
    start = logprobs.detach().double().requires_grad_()
    loss(batch, start, **params).loss.mean().backward()
    for spot in batch.loss_mask.nonzero().tolist():
        step = torch.zeros_like(start)
        step[tuple(spot)] = 1e-5
        with torch.no_grad():
            up, down = (loss(batch, start + sign * step, **params).loss.mean() for sign in (1, -1))
        assert start.grad[tuple(spot)].item() == pytest.approx((up - down).item() / 2e-5, abs=1e-6)
    return start.grad


def test_cross_entropy_is_the_negative_logprob():
    output = cross_entropy(make_batch([0, 0], [0, 0]), row(-0.5, -2.0))
    assert output.loss[0, 1:].tolist() == [0.5, 2.0]


def test_on_policy_the_surrogate_is_minus_the_advantage():
    output = clipped_pg(make_batch([-1.0, -2.0], [0.7, -0.3]), row(-1.0, -2.0))
    assert output.loss[0, 1:].tolist() == pytest.approx([-0.7, 0.3])
    assert output.metrics["clip_fraction"].sum() == 0
    assert output.metrics["ratio"][0, 1:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 1.0, -1.28),  # up with a gain: stops at 1 + clip_high
        (1.5, -1.0, 1.5),  # up with a loss: counts in full
        (0.5, 1.0, -0.5),  # down with a gain: counts in full
        (0.5, -1.0, 0.8),  # down with a loss: stops at 1 - clip_low
        (1.1, 2.0, -2.2),  # inside
    ],
)
def test_off_policy_the_ratio_is_clipped_on_the_pessimistic_side(ratio, advantage, expected):
    batch = make_batch([-1.0], [advantage])
    output = clipped_pg(batch, row(-1.0 + math.log(ratio)), clip_low=0.2, clip_high=0.28)
    assert output.loss[0, 1].item() == pytest.approx(expected, abs=1e-6)
    assert output.metrics["clip_fraction"][0, 1].item() == float(expected in (-1.28, 0.8))


def test_entropy_bonus_lowers_the_loss():
    batch = make_batch([-1.0], [0.0])
    batch.entropies = row(2.0)
    assert clipped_pg(batch, row(-1.0), entropy_coef=0.01).loss[0, 1].item() == pytest.approx(-0.02)


def test_positions_without_mask_do_not_matter():
    batch = make_batch([-1.0], [1.0])
    batch.old_logprobs[0, 0] = float("-inf")
    output = clipped_pg(batch, row(-1.0))
    assert torch.isfinite(output.loss).all()


@pytest.mark.parametrize("name", ["cross_entropy", "clipped_pg"])
def test_gradient_equals_finite_differences(name):
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, -1, 6)
    batch = make_batch(old.tolist(), rng.normal(size=6).tolist(), ref=rng.uniform(-3, -1, 6).tolist())
    for field in ("old_logprobs", "ref_logprobs", "advantages"):
        setattr(batch, field, getattr(batch, field).double())
    params = {"kl_coef": 0.3} if name == "clipped_pg" else {}
    start = torch.tensor([[0.0, *(old + rng.uniform(-0.5, 0.5, 6))]], dtype=torch.float64)
    assert_gradient_is_slope(find_loss(LossSpec(name, params)), batch, start, **params)


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r'no loss named "cliped_pg", did you mean "clipped_pg"\?'):
        find_loss(LossSpec("cliped_pg"))
    with pytest.raises(ConfigError, match=r'the loss "no_such_module:f" cannot be imported: .*no_such_module'):
        find_loss(LossSpec("no_such_module:f"))
    with pytest.raises(ConfigError, match=r'has no parameter "clip_hig", did you mean "clip_high"\?'):
        find_loss(LossSpec("clipped_pg", {"clip_hig": 0.2}))


def test_kl_without_reference_is_refused():
    with pytest.raises(ConfigError, match="ref_logprobs"):
        clipped_pg(make_batch([-1.0], [1.0]), row(-1.0), kl_coef=0.1)


def test_a_loss_is_imported_from_the_module_that_its_name_says(tmp_path, monkeypatch):
    """Keeps torch out of a user's algorithm: the module of the loss is imported on lookup."""
    (tmp_path / "my_losses.py").write_text("import torch\n\ndef mine(batch, logprobs_BT, *, scale=1.0): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_loss(LossSpec("my_losses:mine", {"scale": 2.0})).__name__ == "mine"
    with pytest.raises(ConfigError, match='"my_losses:mine" has no parameter "scal", did you mean "scale"'):
        find_loss(LossSpec("my_losses:mine", {"scal": 2.0}))
    with pytest.raises(ConfigError, match="cannot be imported: .*my_losses.*yours"):
        find_loss(LossSpec("my_losses:yours"))


def test_a_user_registers_a_loss():
    @register_loss("test_squares")
    def squares(batch, logprobs_BT, *, scale: float = 1.0):
        return LossOutput(scale * logprobs_BT**2)

    assert find_loss(LossSpec("test_squares", {"scale": 2.0})) is squares
