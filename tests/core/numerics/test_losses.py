"""Each loss against arithmetic written here, on and off policy, and its gradient against finite differences."""

import math

import pytest
import torch

from reinforge.engine import Engine
from reinforge.engine.losses.base import LossOutput, cross_entropy, find_loss, register_loss
from reinforge.engine.losses.policy_gradient import clipped_pg
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError, EngineError
from reinforge.types.sample import LossSpec
from tests.device import DEVICE
from tests.engines import copy_weights, load_engine, measure_difference, train
from tests.samples import random_samples


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


def load(folder, *, tokens: int = 10_000, **optimizer) -> Engine:
    return load_engine(
        folder,
        optimizer={"learning_rate": 1e-2, **optimizer},
        schedule={"warmup_steps": 0},
        batch={"steps_per_job": 1, "micro_batch_tokens": tokens},
    )


def moved(folder, loss, samples=None, **settings):
    with load(folder, **settings) as engine:
        engine.begin_job()
        metrics = engine.step(samples or random_samples(6), loss)
        return metrics, copy_weights(engine.learner)


def same(left, right, tolerance=0.0):
    return measure_difference(left.values(), right.values()) <= tolerance


def test_it_equals_a_step_of_update(tiny_model_dir):
    samples = random_samples(6)
    metrics, weights = moved(tiny_model_dir, clipped_pg, samples)
    with load(tiny_model_dir) as engine:
        report = train(engine, samples)
        assert same(weights, copy_weights(engine.learner))
    assert metrics == {k: v for k, v in report.metrics.items() if not k.startswith("mismatch")}


def by_token(batch, logprobs_BT):
    return -batch.advantages * logprobs_BT


def by_sample(batch, logprobs_BT):
    lengths_B = batch.loss_mask.sum(dim=1)
    loss_B = -(batch.advantages * logprobs_BT).sum(dim=1) / lengths_B
    return loss_B, {"likelihood": logprobs_BT.detach().sum(dim=1) / lengths_B, "rows": len(batch.lengths)}


def by_batch(batch, logprobs_BT):
    loss_B, metrics = by_sample(batch, logprobs_BT)
    return (loss_B * batch.weights).sum() / batch.weights.sum(), metrics


@pytest.mark.parametrize("loss", [by_token, by_sample, by_batch])
def test_micro_batches_do_not_change_it(tiny_model_dir, loss):
    """One batch or six of one sample: also where the loss is the mean over the batch it saw."""
    whole, weights = moved(tiny_model_dir, loss, max_grad_norm=1e9, name="sgd")
    cut, others = moved(tiny_model_dir, loss, tokens=1, max_grad_norm=1e9, name="sgd")
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert same(weights, others, 1e-6)
    if loss is not by_token:
        assert cut["likelihood"] == pytest.approx(whole["likelihood"], rel=1e-5)
        assert (whole["rows"], cut["rows"]) == (6, 1)


def test_the_mean_by_batch_is_the_mean_by_sample(tiny_model_dir):
    _, weights = moved(tiny_model_dir, by_sample, name="sgd")
    _, others = moved(tiny_model_dir, by_batch, name="sgd")
    assert same(weights, others, 1e-7)


def test_a_loss_that_is_not_finite_changes_no_bit(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        before = engine.fingerprint()
        engine.begin_job()
        assert engine.step(random_samples(3), lambda batch, logprobs_BT: logprobs_BT.sum() * torch.nan) is None
        engine.end_job()
        assert engine.fingerprint() == before
        assert engine.learner.state() == {}


def test_impossible_adapter_settings_are_refused(tiny_model_dir):
    samples = random_samples(3)
    with load(tiny_model_dir) as engine:
        with pytest.raises(EngineError, match="step: no job is open"):
            engine.step(samples, by_token)
        engine.begin_job()
        with pytest.raises(EngineError, match=r"the loss has the shape \[7\]; it must be \[B, T\] = \[3, "):
            engine.step(samples, lambda batch, logprobs_BT: logprobs_BT.sum() * torch.ones(7, device=DEVICE))
        for sample in samples:
            sample.weight = 0.0
        with pytest.raises(EngineError, match="no sample has a trained token and a weight"):
            engine.step(samples, by_token)
        assert engine.learner.num_steps == 0
