"""Gradients that add up over several calls are those of one sum, and a step with them is that of torch's AdamW."""

import math

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig
from reinforge.engine import register_loss
from reinforge.errors import EngineError
from reinforge.types.sample import AdamSettings, LossSpec
from tests.engines import load_engine, measure_error
from tests.samples import ask, random_samples, request

NAMES, LORA = ("one", "two"), LoRAConfig(r=4, lora_alpha=4)
CLIPPED = LossSpec("clipped_pg", {"clip_low": 0.1, "clip_high": 0.1, "tis_cap": None})
OFF_POLICY = LossSpec("clipped_pg", {"clip_low": 1.0, "clip_high": math.inf, "tis_cap": None})


@register_loss("test_accumulate_nan")
def nan(batch, logprobs_BT):
    return logprobs_BT * math.nan


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    with load_engine(tiny_model_dir, lora=LORA, adapters=NAMES, keep_initial=True) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    """Both adapters as they were loaded, and "one" then with other weights."""
    for name in NAMES:
        change(loaded, name, loaded.reset)
        loaded.clear_gradients(name)
    change(loaded, "one", lambda: loaded.put_adapter(loaded.make_adapter(rank=4, seed=5), "one"))
    return loaded


def change(engine, adapter, work):
    engine.begin_job(adapter)
    result = work()
    engine.end_job()
    engine.policies[adapter].open(engine.policies[adapter].version + 1)
    return result


def gradients(engine, adapter="one"):
    learner = engine._learners[adapter]
    return {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}


def samples(count=6, seed=0):
    made = random_samples(count, seed=seed)
    rng = np.random.default_rng(seed)
    for sample in made:
        sample.advantages = rng.normal(size=len(sample)).astype(np.float32) * sample.loss_mask
        sample.sampling_logprobs = np.where(sample.loss_mask, rng.uniform(-7, -4, len(sample)), 0).astype(np.float32)
        sample.temperatures[:] = 1.0
    return made


def by_hand(engine, made, token_loss):
    """Returns the summed loss and its gradient, by transformers' own forward pass."""
    module, total = engine.model.module, torch.zeros(())
    engine.model.use_adapter("one")
    for sample in made:
        ids = torch.from_numpy(sample.token_ids)
        logprobs = module(input_ids=ids[None].to(engine.model.device)).logits[0].float().cpu().log_softmax(-1)
        targets = ids if sample.targets is None else torch.from_numpy(sample.targets)
        for place in np.flatnonzero(sample.loss_mask):
            logp = logprobs[place - 1, targets[place]]
            total = total + token_loss(logp, sample.sampling_logprobs[place], sample.advantages[place])
    parameters = engine._learners["one"].parameters
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return total.item(), {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}


def clip(r, low, high):
    return torch.clamp(r, low, high)


FORMULAS = {
    "weighted_cross_entropy": (LossSpec("weighted_cross_entropy"), lambda p, q, a: -p * a),
    "importance_sampling": (OFF_POLICY, lambda p, q, a: -torch.exp(p - q) * a),
    "ppo": (
        CLIPPED,
        lambda p, q, a: -torch.minimum(torch.exp(p - q) * a, clip(torch.exp(p - q), 0.9, 1.1) * a),
    ),
    "cispo": (
        LossSpec("cispo", {"clip_low": 0.1, "clip_high": 0.1, "tis_cap": None}),
        lambda p, q, a: -clip(torch.exp(p - q), 0.9, 1.1).detach() * p * a,
    ),
    "dro": (LossSpec("dro", {"beta": 0.5}), lambda p, q, a: -p * a + 0.25 * (p - q) ** 2),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_documented_formula_summed_over_tokens(engine, name):
    """Each formula is as Tinker's documentation prints it, and the sum is over all tokens of all data."""
    spec, token_loss = FORMULAS[name]
    made = samples()
    expected, grads = by_hand(engine, made, token_loss)
    report = engine.accumulate(made, spec, adapter="one")
    assert report.loss == pytest.approx(expected, rel=1e-4)
    found = gradients(engine)
    for parameter, grad in grads.items():
        assert torch.allclose(found[parameter].cpu(), grad.cpu(), atol=2e-4 * max(1.0, grad.abs().max())), parameter


def test_targets_are_scored_in_the_place_of_the_tokens(engine):
    made = samples(2)
    for sample in made:
        sample.targets = np.roll(sample.token_ids, 3)
    expected, grads = by_hand(engine, made, FORMULAS["weighted_cross_entropy"][1])
    report = engine.accumulate(made, LossSpec("weighted_cross_entropy"), adapter="one")
    assert report.loss == pytest.approx(expected, rel=1e-4)
    found = gradients(engine)
    assert all(torch.allclose(found[n].cpu(), g.cpu(), atol=1e-3) for n, g in grads.items())


def test_how_data_is_spread_over_calls_changes_nothing(engine):
    made = samples(8)
    whole = engine.accumulate(made, CLIPPED, adapter="one")
    at_once = gradients(engine)
    engine.clear_gradients("one")
    assert gradients(engine) == {}
    parts = [engine.accumulate(made[a:b], CLIPPED, adapter="one") for a, b in ((0, 3), (3, 4), (4, 8))]
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    logprobs = [row for part in parts for row in part.logprobs]
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(logprobs, whole.logprobs, strict=True))
    for name, gradient in gradients(engine).items():
        assert torch.allclose(gradient, at_once[name], atol=1e-4 * max(1.0, at_once[name].abs().max())), name


def test_a_forward_pass_adds_no_gradient_and_a_failure_leaves_the_earlier_ones(engine):
    made = samples(4)
    engine.accumulate(made[:2], CLIPPED, adapter="one")
    before = gradients(engine)
    forward = engine.accumulate(made, CLIPPED, backward=False, adapter="one")
    assert forward.loss == pytest.approx(engine.accumulate(made, CLIPPED, backward=False, adapter="one").loss)
    assert engine.accumulate(made, LossSpec("test_accumulate_nan"), adapter="one") is None
    by_sample = LossSpec("clipped_pg", {**CLIPPED.params, "constant_length": 8})
    with pytest.raises(EngineError, match="one number per token"):  # which cannot be summed over tokens
        engine.accumulate(made, by_sample, adapter="one")
    after = gradients(engine)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def score(engine):
    return engine.logprobs(samples(2), "one")


def test_a_rollback_takes_other_weights_back_with_their_scale(engine):
    made = engine.read_adapter("one")
    tensors = {name: torch.ones_like(tensor) for name, tensor in made.tensors.items()}
    change(engine, "one", lambda: engine.put_adapter(type(made)(tensors, 8.0), "one"))
    before, fingerprint = score(engine), engine.fingerprint("one")
    engine.begin_job("one")
    engine.put_adapter(type(made)(tensors, 2.0), "one")
    assert not np.allclose(score(engine)[0], before[0]), "another scale alone makes another model"
    engine.put_adapter(engine.make_adapter(rank=2, seed=9), "one")
    assert engine.fingerprint("one") != fingerprint
    engine.rollback()
    assert engine.fingerprint("one") == fingerprint
    assert all(np.array_equal(a, b) for a, b in zip(score(engine), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [16.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_a_copy_that_serves_has_the_scale_of_the_weights_that_it_was_given(tiny_model_dir, alpha):
    with load_engine(tiny_model_dir, lora=LORA, adapters=NAMES, serves_during_jobs=True) as engine:
        made = engine.read_adapter("one")
        tensors = {name: torch.full_like(tensor, 0.2) for name, tensor in made.tensors.items()}
        change(engine, "one", lambda: engine.put_adapter(type(made)(tensors, alpha), "one"))
        assert measure_error(engine, ask(engine.policies["one"], [request(seed=3)])) <= 1e-3


def test_without_its_safety_a_failed_call_loses_the_earlier_gradients(engine, monkeypatch):
    made = samples(4)
    engine.accumulate(made[:2], CLIPPED, adapter="one")
    monkeypatch.setattr(type(engine._learners["one"]), "add_gradients", lambda *_: None)
    engine.accumulate(made, LossSpec("test_accumulate_nan"), adapter="one")
    assert gradients(engine) == {}


def test_the_step_is_that_of_adamw(engine):
    made, settings = samples(4), AdamSettings(1e-2, (0.8, 0.9), 1e-6, 0.1, max_grad_norm=0.5)
    learner = engine._learners["one"]
    copies = {name: p.detach().clone().requires_grad_() for name, p in learner.parameters.items()}
    own = torch.optim.AdamW(copies.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(2):
        engine.accumulate(made, CLIPPED, adapter="one")
        for name, gradient in gradients(engine).items():
            copies[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.5).item()
        own.step()
        metrics = change(engine, "one", lambda: engine.apply(settings, "one"))
        assert metrics == {"grad_norm": pytest.approx(norm), "lr": 1e-2}
        assert gradients(engine) == {}
    for name, parameter in learner.parameters.items():
        assert torch.allclose(parameter, copies[name], atol=1e-6), name


def test_without_a_limit_gradients_are_not_clipped(engine):
    engine.accumulate(samples(4), CLIPPED, adapter="one")
    norm = torch.cat([g.flatten() for g in gradients(engine).values()]).norm().item()
    assert norm > 1
    metrics = change(engine, "one", lambda: engine.apply(AdamSettings(0.0), "one"))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_gradients_of_one_adapter_are_not_those_of_another(engine):
    engine.accumulate(samples(2), CLIPPED, adapter="one")
    assert gradients(engine, "two") == {}
    two = engine.read_adapter("two")
    change(engine, "one", lambda: engine.apply(AdamSettings(1e-2), "one"))
    assert all(torch.equal(t, two.tensors[name]) for name, t in engine.read_adapter("two").tensors.items())


def test_an_adapter_of_a_smaller_rank_stays_one(engine):
    change(engine, "one", lambda: engine.put_adapter(engine.make_adapter(rank=2, seed=1, alpha=32), "one"))
    for _ in range(3):
        engine.accumulate(samples(4), CLIPPED, adapter="one")
        change(engine, "one", lambda: engine.apply(AdamSettings(1e-2), "one"))
    weights = engine.read_adapter("one")
    assert weights.lora_alpha == 32 * 4 / 2  # PEFT divides by the rank of its matrices, 4
    for name, tensor in weights.tensors.items():
        used, rest = (tensor[:2], tensor[2:]) if name.endswith(".A") else (tensor[:, :2], tensor[:, 2:])
        assert used.abs().max() > 0
        assert rest.abs().max() == 0


def test_a_copied_adapter_is_the_same_model(engine):
    engine.accumulate(samples(4), CLIPPED, adapter="one")
    change(engine, "one", lambda: engine.apply(AdamSettings(1e-2), "one"))
    made = samples(3)
    own = engine.logprobs(made, "one")
    assert not np.allclose(own[0], engine.logprobs(made, "two")[0])
    change(engine, "two", lambda: engine.put_adapter(engine.read_adapter("one"), "two"))
    assert all(np.array_equal(a, b) for a, b in zip(own, engine.logprobs(made, "two"), strict=True))


def test_what_cannot_be_done_is_refused(engine):
    with pytest.raises(EngineError, match="no job is open"):
        engine.apply(AdamSettings(1e-2), "one")
    with pytest.raises(EngineError, match="every sample needs a trained token"):
        engine.accumulate([], CLIPPED)
    with pytest.raises(EngineError, match="rank 5 is not one of 1 to 4"):
        engine.make_adapter(rank=5, seed=0)
    engine.accumulate(samples(2), CLIPPED, adapter="one")
    with pytest.raises(EngineError, match="tensors are not finite"):
        change(engine, "one", lambda: engine.apply(AdamSettings(1e39), "one"))
    engine.rollback()
    assert all(tensor.isfinite().all() for tensor in engine.read_adapter("one").tensors.values())
