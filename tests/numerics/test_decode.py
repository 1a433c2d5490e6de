"""Decode steps in fewer operations: which models take them, that they compute the same, and follow the weights."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from reinforge.config.schema import LoRAConfig, PolicyConfig
from reinforge.engine import Engine, decode
from reinforge.engine.decode import LlamaSteps
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request

OWN = {"llama", "mistral", "qwen2", "qwen3"}


def load(folder, **config):
    return Engine.load(PolicyConfig(model=str(folder), max_batch=8, **config), seed=0, device="cpu")


def step(engine):
    """Logits after one more token of 6 rows that stand at different places of the cache, `[6, V]`."""
    sampler = engine.policy.sampler

    def compute():
        with torch.inference_mode():
            torch.manual_seed(0)
            sampler._cache.reserve(32, 0)
            for layer in sampler._cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
            return sampler._forward(np.arange(6) * 7, np.array([3, 20, 0, 11, 30, 8]))

    return sampler.call(compute)


def both_ways(engine):
    sampler = engine.policy.sampler
    own, steps = step(engine), sampler._own_steps
    sampler._own_steps = None
    modules, sampler._own_steps = step(engine), steps
    return own, modules


@pytest.mark.parametrize("family", FAMILIES)
def test_own_steps_are_those_of_the_modules(tmp_path, family):
    with load(make_tiny_model(tmp_path, family, **FAMILIES[family])) as engine:
        assert (engine.policy.sampler._own_steps is not None) == (family in OWN)
        own, modules = both_ways(engine)
    assert (own - modules).abs().max() <= 1e-5 * modules.abs().max()


@pytest.mark.parametrize(
    ("config", "is_own"),
    [
        ({"attention_bias": True}, False),
        ({"mlp_bias": True}, False),
        ({"head_dim": 32}, True),
        ({"num_key_value_heads": 4}, True),
        ({"hidden_act": "gelu"}, True),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, True),
        ({"tie_word_embeddings": True}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_of_a_family_count(tmp_path, config, is_own):
    with load(make_tiny_model(tmp_path, "llama", **config)) as engine:
        assert (engine.policy.sampler._own_steps is not None) == is_own
        own, modules = both_ways(engine)
    assert (own - modules).abs().max() <= 1e-5 * modules.abs().max()


def move(engine):
    """Changes the weights as jobs do: while no reply is in flight."""
    generator = torch.Generator().manual_seed(1)

    def change():
        with torch.no_grad():
            for parameter in engine.model.trained_parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)

    engine.policy.sampler.pause()
    engine.policy.sampler.call(change)
    engine.policy.sampler.resume(1)


@pytest.mark.parametrize("family", sorted(OWN))
def test_own_steps_follow_the_weights(tmp_path, monkeypatch, family):
    """Mutation check: copies that are never made anew give other logits."""
    with load(make_tiny_model(tmp_path, family, **FAMILIES[family])) as engine:
        before = step(engine)
        move(engine)
        own, modules = both_ways(engine)
        assert (own - modules).abs().max() <= 1e-5 * modules.abs().max()
        assert (own - before).abs().max() > 0.01
        monkeypatch.setattr(LlamaSteps, "forget", lambda self: None)
        move(engine)
        stale, modules = both_ways(engine)
        assert (stale - modules).abs().max() > 0.01


def test_adapters_go_through_the_modules(tiny_model_dir):
    with load(tiny_model_dir, lora=LoRAConfig(rank=4)) as engine:
        assert engine.policy.sampler._own_steps is None


def test_larger_models_go_through_the_modules(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(decode, "MAX_COPIED_BYTES", 1000)
    with load(tiny_model_dir) as engine:
        assert engine.policy.sampler._own_steps is None


def test_steps_that_compute_something_else_are_not_taken(tiny_model_dir, monkeypatch, caplog):
    """As where a family's next release computes something else."""
    right = LlamaSteps.features
    monkeypatch.setattr(LlamaSteps, "features", lambda *args: right(*args) * 1.5)
    with caplog.at_level(logging.WARNING), load(tiny_model_dir) as engine:
        assert engine.policy.sampler._own_steps is None
        assert "which are slower" in caplog.text
        assert ask(engine.policy, [request("still there")])[0].num_completion_tokens
