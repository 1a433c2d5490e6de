"""Optimizers against arithmetic written here; their state survives checkpoint and rollback to the last bit."""

import logging

import pytest
import torch
from torch import nn

from reinforge.config.policy import OptimizerConfig
from reinforge.engine import Engine
from reinforge.engine.training.optimizers import get_state_keys, make_optimizer
from reinforge.types.sample import LossSpec
from tests.engines import copy_weights, load_engine
from tests.engines import train as make_job
from tests.samples import random_samples

CLIPPED = LossSpec("clipped_pg")
EACH = {
    "adamw": {"weight_decay": 0.1},
    "adam": {"weight_decay": 0.1},
    "sgd": {},
    "sgd_momentum": {"momentum": 0.9},
    "rmsprop": {},
    "rmsprop_momentum": {"momentum": 0.9, "smoothing": 0.9},
    "adagrad": {},
}


def settings(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name.partition("_")[0], learning_rate=1e-2, **EACH[name])


def load(folder, name: str = "adamw", **policy) -> Engine:
    policy = {"optimizer": settings(name), "schedule": {"warmup_steps": 0}, "batch": {"steps_per_job": 2}, **policy}
    return load_engine(folder, **policy)


def train(engine: Engine, seed: int) -> None:
    assert make_job(engine, random_samples(6, seed)).num_updates == 2


def all_bits(engine: Engine) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in engine.learner.state().items()}
    return {f"weight.{name}": value for name, value in copy_weights(engine.learner).items()} | state


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # gradients 0.5 then 0.25, rate 0.1, from 1
        ({"name": "sgd"}, [0.95, 0.925]),
        ({"name": "sgd", "weight_decay": 0.1}, [0.94, 0.9056]),  # 0.94 - 0.1 (0.25 + 0.094)
        ({"name": "sgd", "momentum": 0.5}, [0.95, 0.90]),  # 0.5 0.5 + 0.25 = 0.5
        ({"name": "adagrad"}, [0.9, 0.9 - 0.025 / 0.3125**0.5]),  # sums 0.25, 0.3125
        ({"name": "rmsprop", "smoothing": 0.5}, [1 - 0.05 / 0.125**0.5, 1 - 0.05 / 0.125**0.5 - 0.025 / 0.09375**0.5]),
        # first moments 0.5, 1/3; second 0.25, 0.125, both corrected for their start at 0
        ({"name": "adam", "betas": (0.5, 0.5)}, [0.9, 0.9 - 0.1 / 3 / 0.125**0.5]),
        ({"name": "adamw", "betas": (0.5, 0.5), "weight_decay": 0.1}, [0.89, 0.89 * 0.99 - 0.1 / 3 / 0.125**0.5]),
    ],
)
def test_two_steps_by_hand(config, expected):
    config = OptimizerConfig(learning_rate=0.1, **config)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer(config, [{"params": [weight], "weight_decay": config.weight_decay}])
    for gradient, value in zip((0.5, 0.25), expected, strict=True):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        assert weight.item() == pytest.approx(value, abs=1e-6)


def test_state_keys_of_each_optimizer():
    found = {name: get_state_keys(settings(name)) for name in EACH}
    assert found == {
        "adamw": {"step", "exp_avg", "exp_avg_sq"},
        "adam": {"step", "exp_avg", "exp_avg_sq"},
        "sgd": set(),
        "sgd_momentum": {"momentum_buffer"},
        "rmsprop": {"step", "square_avg"},
        "rmsprop_momentum": {"step", "square_avg", "momentum_buffer"},
        "adagrad": {"step", "sum"},
    }
    for name, slots in found.items():
        assert len(slots - {"step"}) == settings(name).num_moments, "what `check` makes room for"


CASES = [
    ("adamw", {"dtype": "bfloat16", "lora": {"r": 4}}),
    *(pytest.param(name, {"dtype": "bfloat16"}, marks=pytest.mark.slow) for name in EACH),
    pytest.param("rmsprop_momentum", {"dtype": "float32"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "policy"), CASES, ids=str)
def test_a_checkpoint_and_a_rollback_bring_back_every_bit(tiny_model_dir, tmp_path, name, policy):
    with load(tiny_model_dir, name, **policy) as engine:
        train(engine, 0)
        engine.save(tmp_path / "c", 1)
        before = all_bits(engine)
        train(engine, 1)
        expected = all_bits(engine)
        assert not same(expected, before)
        engine.rollback()
        assert same(all_bits(engine), before)
    with load(tiny_model_dir, name, **policy) as engine:
        engine.load_weights(tmp_path / "c")
        train(engine, 1)
        assert same(all_bits(engine), expected)
        if get_state_keys(settings(name)) or policy["dtype"] == "bfloat16":  # without the state the run would differ
            engine.load_weights(tmp_path / "c")
            engine.learner.reset()
            train(engine, 1)
            assert not same(all_bits(engine), expected)
    if policy["dtype"] == "bfloat16":  # the float32 copies are those of the trained weights alone
        copies, weights = ({key for key in expected if key.startswith(kind)} for kind in ("master.", "weight."))
        assert {key.replace("master.", "weight.", 1) for key in copies} == weights


def test_another_optimizers_state_is_ignored_with_a_warning(tiny_model_dir, tmp_path, caplog):
    with load(tiny_model_dir, "adamw") as engine:
        train(engine, 0)
        engine.save(tmp_path / "c", 1)
        weights = engine.fingerprint()
    with load(tiny_model_dir, "rmsprop") as engine, caplog.at_level(logging.WARNING):
        engine.load_weights(tmp_path / "c")
        assert (engine.fingerprint(), engine.learner.num_steps, engine.learner.state()) == (weights, 2, {})
        train(engine, 1)
    assert "another optimizer's state (exp_avg, exp_avg_sq, step; rmsprop needs square_avg, step)" in caplog.text
