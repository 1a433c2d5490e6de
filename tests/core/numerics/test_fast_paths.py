"""The switch for the fast paths turns each of them off; that log-probs then stay is tested by the parity tests."""

import asyncio
import gc
from dataclasses import fields

import pytest
import torch
from torch import nn

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import THRESHOLDS
from reinforge.engine.model import attention, loading, products
from reinforge.engine.model.causal_model import find_last_layer
from reinforge.engine.model.loading import load_model
from reinforge.engine.sampling import token_sampling
from reinforge.engine.sampling.threads import ThreadLoad
from tests.core.engine.test_garbage_collection import count_frozen_from_now
from tests.device import DEVICE
from tests.engines import LIKELIHOOD, load_engine, train
from tests.samples import ask, request, sibling_samples
from tests.scripted_run import ScriptedRun, by_answer

KERNELS = ("flash_attention", "decode_attention", "few_keys_attention")


@pytest.fixture(scope="module", params=[True, False], ids=["on", "off"])
def engine(request, tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=8, fast_paths=request.param, keep_reference=True) as engine:
        yield engine


def sample_and_train(engine):
    """Samples short and long prompts, and a second turn; then makes one job with shared prefixes."""
    first = request("a" * 200, max_tokens=2)
    ask(engine.policy, [request("short", max_tokens=3), first])
    ask(engine.policy, [request("a" * 200 + "and more", max_tokens=2)])
    train(engine, sibling_samples(), LIKELIHOOD)


def uses_decode(engine, monkeypatch):
    return engine.policy.sampler._prefiller.fast_llama is not None


def uses_attention(engine, monkeypatch):
    """By name, in place over shared prefixes, and by calls of the kernels: all of these agree."""
    calls = []
    for kernel in KERNELS:
        right = getattr(attention, kernel)
        monkeypatch.setattr(attention, kernel, lambda *args, right=right: (calls.append(right), right(*args))[1])
    sample_and_train(engine)
    masks = engine.learner.masks
    assert masks is not None, "prefixes are shared either way"
    names = {engine.model.attn_implementation, engine.reference.attn_implementation}
    assert len({bool(calls), masks.shares_in_place, names == {attention.GROUPED_ATTENTION}}) == 1
    assert calls or names == {"sdpa"}
    return bool(calls)


def uses_threads(engine, monkeypatch):
    """A decode step while agents are busy, in a sampler with two threads."""
    monkeypatch.setattr(ThreadLoad, "measure", lambda self: 0.9)
    seen, sampler = set(), engine.policy.sampler
    before, right = sampler.call(torch.get_num_threads), sampler._forward

    def forward(*args):
        seen.add(torch.get_num_threads())
        return right(*args)

    monkeypatch.setattr(sampler, "_forward", forward)
    sampler.call(lambda: torch.set_num_threads(2))
    ask(engine.policy, [request(max_tokens=4)])
    sampler.call(lambda: torch.set_num_threads(before))
    assert len(seen) == 1
    return seen == {1}


def uses_last_mlp(engine, monkeypatch):
    places = []
    mlp = find_last_layer(engine.model.module).mlp
    hook = mlp.register_forward_hook(lambda _, inputs, output: places.append(inputs[0].shape[:-1].numel()))
    (reply,) = ask(engine.policy, [request("b" * 200, max_tokens=1)])
    hook.remove()
    assert places in ([1], [reply.num_prompt_tokens])
    return places == [1]


def uses_torchscript(folder, enabled, monkeypatch):
    compiled = []
    token_sampling._compile.cache_clear()
    monkeypatch.setattr(torch.jit, "script", lambda function: (compiled.append(function), function)[1])
    try:
        with load_engine(folder, fast_paths=enabled) as engine:
            ask(engine.policy, [request(max_tokens=2)])
    finally:
        token_sampling._compile.cache_clear()
    return bool(compiled)


def uses_garbage_collection(folder, enabled, monkeypatch):
    """The collector's thresholds while a run collects episodes."""
    thresholds = set()

    def reward(output, expected):
        thresholds.add(gc.get_threshold())
        return by_answer(output, expected)

    run = ScriptedRun(folder, reward=reward)
    run.settings["finetuning"] |= {"policy": {"fast_paths": enabled}, "num_epochs": 1}
    before = gc.get_threshold()
    with count_frozen_from_now():
        asyncio.run(run.run())
    assert thresholds in ({THRESHOLDS}, {before})
    return thresholds == {THRESHOLDS}


def uses_fused_layers(folder, enabled, monkeypatch):
    module = load_model(PolicyConfig(model=str(folder), lora=LoRAConfig(r=2), fast_paths=enabled), 0, DEVICE).module
    fused = {"forward" in vars(layer) for name, layer in module.named_modules() if name.endswith("_proj")}
    assert len(fused) == 1
    return fused == {True}


def uses_products(folder, enabled, monkeypatch):
    monkeypatch.setattr(products, "measure_speedup", lambda num_inputs, num_outputs: 2.0)
    monkeypatch.setattr(products, "MIN_FEATURES", 32)
    monkeypatch.setattr(loading, "WIDE", 32)
    module = load_model(PolicyConfig(model=str(folder), fast_paths=enabled), 0, DEVICE).module
    return any("forward" in vars(layer) for layer in module.modules() if type(layer) is nn.Linear)


OF_AN_ENGINE = {
    "decode": uses_decode,
    "attention": uses_attention,
    "threads": uses_threads,
    "last_mlp": uses_last_mlp,
}
OTHERS = {
    "torchscript": uses_torchscript,
    "fused_layers": uses_fused_layers,
    "products": uses_products,
    "garbage_collection": uses_garbage_collection,
}
FOR_CPUS = ("attention", "torchscript", "products")


def test_every_fast_path_has_a_probe():
    names = [field.name for field in fields(FastPaths) if field.name != "serving"]  # not a path of training
    assert sorted([*OF_AN_ENGINE, *OTHERS]) == sorted(names)
    for enabled in (True, False):
        assert [getattr(FastPaths.switch(enabled), name) for name in names] == [enabled] * len(names)
    assert PolicyConfig().fast_paths


@pytest.mark.parametrize("path", OF_AN_ENGINE)
def test_the_switch_turns_every_fast_path_of_an_engine_on_and_off(path, engine, monkeypatch):
    if DEVICE != "cpu" and path in FOR_CPUS:
        pytest.skip("a path for CPUs alone")
    assert OF_AN_ENGINE[path](engine, monkeypatch) == engine.config.fast_paths


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("path", OTHERS)
def test_the_switch_turns_every_other_fast_path_on_and_off(path, enabled, tiny_model_dir, tmp_path, monkeypatch):
    if DEVICE != "cpu" and path in FOR_CPUS:
        pytest.skip("a path for CPUs alone")
    folder = tmp_path if path == "garbage_collection" else tiny_model_dir
    assert OTHERS[path](folder, enabled, monkeypatch) == enabled
