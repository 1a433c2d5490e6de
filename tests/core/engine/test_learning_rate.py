"""The default learning rate, what the settings print of it, and the warning about one far beyond it."""

import logging

import pytest
import torch

from reinforge.config.policy import LoRAConfig, OptimizerConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.learning_rate import (
    choose_learning_rate,
    count_parameters,
    describe_learning_rate,
    format_count,
)
from reinforge.engine.model.loading import add_adapter, load_module
from reinforge.types.sample import LossSpec
from tests.device import DEVICE

SFT, GRPO = LossSpec("cross_entropy"), LossSpec("clipped_pg")


@pytest.mark.parametrize(
    ("count", "full", "lora", "imitating", "imitating_lora"),
    [
        (344_064, 1e-3, 1e-3, 1e-3, 1e-3),
        (19_999_999, 1e-3, 1e-3, 1e-3, 1e-3),
        (20_000_000, 1e-5, 1e-4, 2e-4, 1e-3),
        (153_000_000, 1e-5, 1e-4, 2e-4, 1e-3),
        (494_000_000, 1e-6, 1e-5, 2e-5, 2e-4),
        (8_030_000_000, 1e-6, 1e-5, 2e-5, 2e-4),
    ],
)
def test_the_default_by_size_lora_and_imitation(count, full, lora, imitating, imitating_lora):
    policy, rates = PolicyConfig(model="m"), []
    for loss in (GRPO, SFT):
        rates += [choose_learning_rate(policy, count, uses_lora=uses, loss=loss).value for uses in (False, True)]
    assert rates == pytest.approx([full, lora, imitating, imitating_lora])
    assert choose_learning_rate(PolicyConfig(init="random"), count, uses_lora=False).value == 1e-3


def set_to(value, count, **settings):
    policy = PolicyConfig(model="m", optimizer=OptimizerConfig(learning_rate=value), **settings)
    return choose_learning_rate(policy, count, uses_lora=policy.lora is not None)


def test_what_is_printed():
    rate = choose_learning_rate(PolicyConfig(model="m"), 153_000_000, uses_lora=False, loss=SFT)
    assert str(rate) == "0.0002 (the default for all weights of 153 M parameters, imitating)"
    assert str(set_to(3e-5, 153_000_000)) == "3e-05"
    assert str(set_to(1e-3, 153_000_000)) == (
        "0.001 (100 times the default of 1e-05 for all weights of 153 M parameters)"
    )
    assert [format_count(n) for n in (344_064, 9_900_000, 135_000_000, 1_540_000_000)] == [
        "0.34 M",
        "9.9 M",
        "135 M",
        "1.5 B",
    ]


@pytest.mark.parametrize(
    ("value", "count", "settings", "warns"),
    [
        (1e-3, 153_000_000, {}, True),
        (1e-4, 153_000_000, {}, False),  # ten times the default
        (1.1e-4, 153_000_000, {}, True),
        (1e-3, 153_000_000, {"lora": LoRAConfig()}, False),
        (1e-3, 494_000_000, {"lora": LoRAConfig()}, True),
        (1e-2, 344_064, {}, False),
        (1e-3, 153_000_000, {"init": "random"}, False),
    ],
)
def test_a_rate_far_beyond_the_default_is_warned_about(value, count, settings, warns):
    warning = set_to(value, count, **settings).warning
    assert (warning is not None) == warns
    if warns:
        assert "often destroys what the model has learned: lower it, or leave it out (null)" in warning


def test_parameters_are_counted_without_loading_the_model(tiny_model_dir, tmp_path):
    module = load_module(tiny_model_dir, torch.float32)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count_parameters(str(tiny_model_dir)) == count
    add_adapter(module, LoRAConfig(r=2), seed=0)
    module.save_pretrained(tmp_path / "adapter")
    assert count_parameters(str(tmp_path / "adapter")) == count, "those of the base model"
    assert count_parameters("owner/name") is None
    assert count_parameters(str(tmp_path)) is None
    assert describe_learning_rate(PolicyConfig(model="owner/name")) == "chosen by the model's size once it is loaded"
    assert describe_learning_rate(PolicyConfig(model=str(tiny_model_dir))).startswith("0.001 (the default for all ")
    assert "LoRA on" in describe_learning_rate(PolicyConfig(model=str(tmp_path / "adapter")))


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=2)])
def test_the_engine_uses_the_rate_that_is_printed(tiny_model_dir, monkeypatch, caplog, lora):
    """With sizes a thousand times smaller the tiny model is a large one."""
    from reinforge.engine import learning_rate

    monkeypatch.setattr(learning_rate, "BY_SIZE", ((1000, 1e-3), (float("inf"), 1e-5)))
    policy = PolicyConfig(model=str(tiny_model_dir), lora=lora)
    expected = 1e-4 if lora else 1e-5
    with Engine.load(policy, seed=0, device=DEVICE) as engine:
        assert engine.config.optimizer.learning_rate == pytest.approx(expected)
        assert [group["peak"] for group in engine.learner.optimizer.param_groups] == pytest.approx([expected] * 2)
    assert describe_learning_rate(policy).startswith(f"{expected:g} (the default for ")
    assert policy.optimizer.learning_rate is None, "the configuration stays what the user wrote"
    with caplog.at_level(logging.WARNING):
        policy.optimizer.learning_rate = 3e-3
        Engine.load(policy, seed=0, device=DEVICE).close()
    assert f"finetuning.policy.optimizer.learning_rate: 0.003 is {3e-3 / expected:.0f} times the default" in caplog.text


def test_without_a_model_a_learner_keeps_the_rate_of_small_models():
    assert OptimizerConfig().peak == 1e-3
    assert OptimizerConfig(learning_rate=0.5).peak == 0.5
