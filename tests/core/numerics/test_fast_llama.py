"""Fast decoding of Llama-like models: which models use it, that its logits are the modules', and new weights."""

import logging

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.loading import load_model
from reinforge.engine.sampling import fast_llama, llama_weights, projection, token_sampling
from reinforge.engine.sampling.fast_llama import FastLlama, supports_fast_decode
from reinforge.engine.sampling.prefill import PrefillRequest
from reinforge.engine.sampling.running_batch import SampleRequest
from tests.device import DEVICE
from tests.engines import load_engine
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request

EACH_SUPPORTED = pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "mistral", "qwen2"))]
)


def load(folder, **settings):
    return load_engine(folder, max_num_seqs=8, **settings)


def load_family(tmp_path, family, **settings):
    return load(make_tiny_model(tmp_path, family, **FAMILIES[family]), **settings)


def find_fast_llama(engine):
    return engine.policy.sampler._prefiller.fast_llama


def step(engine):
    """Logits after one more token of 6 rows at different positions of the cache, `[6, V]`."""
    sampler = engine.policy.sampler

    def compute():
        with torch.inference_mode():
            torch.manual_seed(0)
            sampler._cache.reserve(32, 0, 6)
            for layer in sampler._cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
            return sampler._forward(np.arange(6) * 7, np.array([3, 20, 0, 11, 30, 8]))

    return sampler.call(compute)


def prompts(engine):
    """Logits after three prompts of 3, 7 and 8 tokens, one of which has two replies, `[4, V]`; and their slots."""
    sampler = engine.policy.sampler
    prefills = [
        PrefillRequest(ids, [SampleRequest(ids, 1)] * count)
        for ids, count in (((5, 6, 7), 1), (tuple(range(20, 27)), 2), (tuple(range(40, 48)), 1))
    ]

    def compute():
        with torch.inference_mode():
            logits = sampler._prefiller.run(prefills, 0)
            slots = [sampler._cache.copy_out(slot, 3) for slot in range(4)]
            return torch.cat([logits.flatten(), *(part.flatten() for parts in slots for part in parts)])

    return sampler.call(compute)


def both_ways(engine, compute):
    prefiller = engine.policy.sampler._prefiller
    fast, path = compute(engine), prefiller.fast_llama
    prefiller.fast_llama = None
    modules = compute(engine)
    prefiller.fast_llama = path
    return fast, modules


def assert_equal_to_modules(engine):
    for compute in (step, prompts):
        fast, modules = both_ways(engine, compute)
        assert (fast - modules).abs().max() <= 1e-5 * modules.abs().max()


def rope(kind):
    return {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma3_text", FAMILIES["gemma3_text"]),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", rope("dynamic")),
    ],
)
def test_what_it_does_not_know_is_left_to_the_modules(tmp_path, family, config):
    policy = PolicyConfig(model=str(make_tiny_model(tmp_path, family, **config)))
    assert not supports_fast_decode(load_model(policy, 0, DEVICE))


def test_settings_that_it_knows_have_the_logits_of_the_modules(tmp_path):
    config = {"head_dim": 32, "num_key_value_heads": 4, "tie_word_embeddings": True, **rope("linear")}
    with load(make_tiny_model(tmp_path, "llama", **config)) as engine:
        assert find_fast_llama(engine) is not None
        assert_equal_to_modules(engine)


def change_weights(engine, adapter="default"):
    """Changes the weights as jobs do: while no reply is in flight."""
    generator = torch.Generator().manual_seed(ord(adapter[0]))

    def change():
        with torch.no_grad():
            for parameter in engine.model.trained_parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(DEVICE), alpha=0.02)

    engine.policy.sampler.pause(adapter)
    engine.policy.sampler.call(change)
    engine.policy.sampler.resume(1, adapter)


@EACH_SUPPORTED
def test_logits_are_those_of_the_modules_with_new_weights_too(tmp_path, monkeypatch, family):
    """Mutation check: copies that are never refreshed give other logits."""
    with load_family(tmp_path, family) as engine:
        assert find_fast_llama(engine) is not None
        assert_equal_to_modules(engine)
        before = step(engine)
        change_weights(engine)
        assert_equal_to_modules(engine)
        assert (step(engine) - before).abs().max() > 0.01
        monkeypatch.setattr(FastLlama, "drop_weights", lambda *args: None)
        change_weights(engine)
        stale, modules = both_ways(engine, step)
        assert (stale - modules).abs().max() > 0.01


@EACH_SUPPORTED
def test_adapters_stay_beside_the_weights(tmp_path, monkeypatch, family):
    """Mutation check: without the adapters the logits are others."""
    lora = LoRAConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    with load_family(tmp_path, family, lora=lora) as engine:
        assert find_fast_llama(engine) is not None
        before = step(engine)
        change_weights(engine)
        assert_equal_to_modules(engine)
        assert (step(engine) - before).abs().max() > 0.001
        collect = projection.collect_adapter
        monkeypatch.setattr(llama_weights, "collect_adapter", lambda layers, name: collect(layers, "none"))
        engine.policy.sampler.call(find_fast_llama(engine).drop_weights)
        bare, modules = both_ways(engine, step)
        assert (bare - modules).abs().max() > 0.001


@EACH_SUPPORTED
def test_rows_of_several_adapters_have_the_logits_of_the_modules(tmp_path, family):
    """Six rows and three prompts, whose adapters alternate."""
    with load_family(tmp_path, family, lora=LoRAConfig(r=4), adapters=("a", "b", "c")) as engine:
        assert find_fast_llama(engine) is not None
        for name in ("c", "b", "a"):
            engine.model.use_adapter(name)
            change_weights(engine, name)
        for compute, names in ((step, "bacabb"), (prompts, "cab")):

            def mixed(engine, compute=compute, names=names):
                with engine.policy.sampler._route_adapters(list(names)):
                    return compute(engine)

            fast, modules = both_ways(engine, mixed)
            assert (fast - modules).abs().max() <= 1e-5 * modules.abs().max()
            assert (fast - compute(engine)).abs().max() > 0.01, "one adapter for all rows gives other logits"


@EACH_SUPPORTED
def test_bfloat16_logits_are_those_of_the_modules(tmp_path, family):
    """To within eight roundings of the largest number."""
    with load_family(tmp_path, family, dtype="bfloat16", lora=LoRAConfig(r=4)) as engine:
        assert find_fast_llama(engine) is not None
        change_weights(engine)
        for compute in (prompts, step):
            fast, modules = both_ways(engine, compute)
            assert (fast.float() - modules.float()).abs().max() <= 2**-5 * modules.float().abs().max()


def test_models_too_large_to_copy_use_the_modules(tiny_model_dir, monkeypatch, caplog):
    monkeypatch.setattr(fast_llama, "find_max_bytes", lambda *args: 1000)
    with caplog.at_level(logging.INFO), load(tiny_model_dir) as engine:
        assert find_fast_llama(engine) is None
        assert "sampling llama with transformers' own modules" in caplog.text


FOR_CPUS = pytest.mark.skipif(DEVICE != "cpu", reason="a path for CPUs alone")


@FOR_CPUS
def test_logits_are_the_same_without_packed_weights(tiny_model_dir, monkeypatch):
    with load(tiny_model_dir) as engine:
        found = prompts(engine), step(engine)
    monkeypatch.setattr(projection, "can_pack", lambda *args: False)
    with load(tiny_model_dir) as engine:
        assert not find_fast_llama(engine).weights.collect_layers(("default",))[0].qkv.weight.plain.is_mkldnn
        assert all((a - b).abs().max() <= 1e-5 for a, b in zip(found, (prompts(engine), step(engine)), strict=True))


@pytest.mark.parametrize("part", ["decode_step", "prefill"])
def test_a_fast_path_with_other_logits_is_not_used(tiny_model_dir, monkeypatch, caplog, part):
    """As if a family's next release computed something else."""
    right = getattr(FastLlama, part)

    def wrong(*args):
        return right(*args) * 1.5

    monkeypatch.setattr(FastLlama, part, wrong)
    with caplog.at_level(logging.WARNING), load(tiny_model_dir) as engine:
        assert find_fast_llama(engine) is None
        assert "sampling with transformers' own modules (slower)" in caplog.text
        assert ask(engine.policy, [request("still there")])[0].num_completion_tokens


@FOR_CPUS
def test_logits_are_the_same_without_torchscript(tiny_model_dir, monkeypatch, caplog):
    """As in a torch that has removed it."""

    def gone(function):
        raise RuntimeError("torch.jit.script is gone")

    with load(tiny_model_dir) as engine:
        found = prompts(engine), step(engine)
        assert isinstance(find_fast_llama(engine)._decode, torch.jit.ScriptFunction)
    token_sampling._compile.cache_clear()
    monkeypatch.setattr(torch.jit, "script", gone)
    try:
        with caplog.at_level(logging.INFO), load(tiny_model_dir) as engine:
            assert "sampling without TorchScript (slower): torch.jit.script is gone" in caplog.text
            assert not isinstance(find_fast_llama(engine)._decode, torch.jit.ScriptFunction)
            assert all((a - b).abs().max() <= 1e-5 for a, b in zip(found, (prompts(engine), step(engine)), strict=True))
    finally:
        token_sampling._compile.cache_clear()


def test_long_prompts_use_the_modules(tiny_model_dir, tmp_path):
    """And so do prompts longer than a sliding window."""
    with load(tiny_model_dir) as engine:
        fast = find_fast_llama(engine)
        assert fast.can_prefill(fast_llama.MAX_PROMPT)
        assert not fast.can_prefill(fast_llama.MAX_PROMPT + 1)
    with load(make_tiny_model(tmp_path, "mistral", sliding_window=8)) as engine:
        fast = find_fast_llama(engine)
        assert fast.can_prefill(8)
        assert not fast.can_prefill(9)
