"""Models of Llama's type in fewer operations: which are sampled so, that it is the same, and follows the weights."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from reinforge.config.schema import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling import fast_llama as direct
from reinforge.engine.sampling import torchscript as scripted
from reinforge.engine.sampling.fast_llama import DirectLlama
from reinforge.engine.sampling.prefill import Opening
from reinforge.engine.sampling.running_batch import SampleRequest
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


def prompts(engine):
    """Logits after three prompts of 3, 7 and 8 tokens, one of which two replies begin with, `[4, V]`; slots, too."""
    sampler = engine.policy.sampler
    openings = [
        Opening(ids, [SampleRequest(ids, 1)] * count)
        for ids, count in (((5, 6, 7), 1), (tuple(range(20, 27)), 2), (tuple(range(40, 48)), 1))
    ]

    def compute():
        with torch.inference_mode():
            logits = sampler._prefill.read(openings, 0)
            slots = [sampler._cache.take(slot, 3) for slot in range(4)]
            return torch.cat([logits.flatten(), *(part.flatten() for parts in slots for part in parts)])

    return sampler.call(compute)


def both_ways(engine, compute):
    sampler = engine.policy.sampler
    own, known = compute(engine), sampler._prefill.direct
    sampler._prefill.direct = None
    modules = compute(engine)
    sampler._prefill.direct = known
    return own, modules


def assert_alike(engine):
    for compute in (step, prompts):
        own, modules = both_ways(engine, compute)
        assert (own - modules).abs().max() <= 1e-5 * modules.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_are_those_of_the_modules(tmp_path, family):
    with load(make_tiny_model(tmp_path, family, **FAMILIES[family])) as engine:
        assert (engine.policy.sampler._prefill.direct is not None) == (family in OWN)
        assert_alike(engine)


@pytest.mark.parametrize(
    ("config", "is_own"),
    [
        ({"attention_bias": True}, False),
        ({"mlp_bias": True}, False),
        ({"head_dim": 32}, True),
        ({"num_key_value_heads": 4}, True),
        ({"hidden_act": "gelu"}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}, False),
        ({"tie_word_embeddings": True}, True),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_of_a_family_count(tmp_path, config, is_own):
    with load(make_tiny_model(tmp_path, "llama", **config)) as engine:
        assert (engine.policy.sampler._prefill.direct is not None) == is_own
        assert_alike(engine)


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
def test_direct_follow_the_weights(tmp_path, monkeypatch, family):
    """Mutation check: copies that are never made anew give other logits."""
    with load(make_tiny_model(tmp_path, family, **FAMILIES[family])) as engine:
        before = step(engine)
        move(engine)
        assert_alike(engine)
        assert (step(engine) - before).abs().max() > 0.01
        monkeypatch.setattr(DirectLlama, "forget", lambda self: None)
        move(engine)
        stale, modules = both_ways(engine, step)
        assert (stale - modules).abs().max() > 0.01


def test_adapters_go_through_the_modules(tiny_model_dir):
    with load(tiny_model_dir, lora=LoRAConfig(rank=4)) as engine:
        assert engine.policy.sampler._prefill.direct is None


def test_larger_models_go_through_the_modules(tmp_path, caplog):
    """Gate and up of two layers, 2 x 2 x 64 x 70,000 numbers, are 68 MiB."""
    with caplog.at_level(logging.INFO), load(make_tiny_model(tmp_path, "llama", intermediate_size=70_000)) as engine:
        assert engine.policy.sampler._prefill.direct is None
        assert "this llama model is sampled by transformers' modules" in caplog.text


@pytest.mark.parametrize("part", ["step", "read"])
def test_what_computes_something_else_is_not_taken(tiny_model_dir, monkeypatch, caplog, part):
    """As where a family's next release computes something else."""
    right = getattr(DirectLlama, part)

    def wrong(*args):
        return right(*args) * 1.5

    monkeypatch.setattr(DirectLlama, part, wrong)
    with caplog.at_level(logging.WARNING), load(tiny_model_dir) as engine:
        assert engine.policy.sampler._prefill.direct is None
        assert "transformers' modules sample, which is slower" in caplog.text
        assert ask(engine.policy, [request("still there")])[0].num_completion_tokens


def test_without_torchscript_it_is_the_same(tiny_model_dir, monkeypatch, caplog):
    """A torch that has none any more."""

    def gone(function):
        raise RuntimeError("torch.jit.script is gone")

    with load(tiny_model_dir) as engine:
        found = prompts(engine), step(engine)
        assert isinstance(engine.policy.sampler._prefill.direct._decode, torch.jit.ScriptFunction)
    scripted._script.cache_clear()
    monkeypatch.setattr(torch.jit, "script", gone)
    try:
        with caplog.at_level(logging.INFO), load(tiny_model_dir) as engine:
            assert "no TorchScript: torch.jit.script is gone" in caplog.text
            assert not isinstance(engine.policy.sampler._prefill.direct._decode, torch.jit.ScriptFunction)
            assert all((a - b).abs().max() <= 1e-5 for a, b in zip(found, (prompts(engine), step(engine)), strict=True))
    finally:
        scripted._script.cache_clear()


def test_long_prompts_go_through_the_modules(tiny_model_dir, tmp_path):
    """And so do those that a window does not reach over."""
    with load(tiny_model_dir) as engine:
        known = engine.policy.sampler._prefill.direct
        assert known.can_read(direct.MAX_PROMPT)
        assert not known.can_read(direct.MAX_PROMPT + 1)
    with load(make_tiny_model(tmp_path, "mistral", sliding_window=8)) as engine:
        known = engine.policy.sampler._prefill.direct
        assert known.can_read(8)
        assert not known.can_read(9)
