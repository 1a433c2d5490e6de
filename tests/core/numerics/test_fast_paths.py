"""The switch for the fast paths turns each of them off; that log-probs then stay is tested by the parity tests."""

import asyncio
import gc
from dataclasses import fields

import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import garbage_collection
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.garbage_collection import THRESHOLDS
from reinforge.engine.model import attention
from reinforge.engine.model.causal_model import find_last_layer
from reinforge.engine.sampling import token_sampling
from reinforge.engine.sampling.threads import ThreadLoad
from tests.device import DEVICE
from tests.engines import LIKELIHOOD, load_engine, train
from tests.samples import ask, request, sibling_samples
from tests.scripted_run import ScriptedRun, by_answer

KERNELS = ("flash_attention", "decode_attention", "few_keys_attention")


def load(folder, enabled):
    return load_engine(folder, max_num_seqs=8, fast_paths=enabled, keep_reference=True)


def sample_and_train(engine):
    """Samples short and long prompts, and a second turn; then makes one job with shared prefixes."""
    first = request("a" * 200, max_tokens=2)
    ask(engine.policy, [request("short", max_tokens=3), first])
    ask(engine.policy, [request("a" * 200 + "and more", max_tokens=2)])
    train(engine, sibling_samples(), LIKELIHOOD)


def uses_decode(folder, enabled, monkeypatch):
    with load(folder, enabled) as engine:
        return engine.policy.sampler._prefiller.fast_llama is not None


def uses_attention(folder, enabled, monkeypatch):
    """By name, in place over shared prefixes, and by calls of the kernels: all of these agree."""
    calls = []
    for kernel in KERNELS:
        right = getattr(attention, kernel)
        monkeypatch.setattr(attention, kernel, lambda *args, right=right: (calls.append(right), right(*args))[1])
    with load(folder, enabled) as engine:
        sample_and_train(engine)
        masks = engine.learner.masks
        assert masks is not None, "prefixes are shared either way"
        names = {engine.model.attn_implementation, engine.reference.attn_implementation}
    assert len({bool(calls), masks.shares_in_place, names == {attention.GROUPED_ATTENTION}}) == 1
    assert calls or names == {"sdpa"}
    return bool(calls)


def uses_torchscript(folder, enabled, monkeypatch):
    compiled = []
    token_sampling._compile.cache_clear()
    monkeypatch.setattr(torch.jit, "script", lambda function: (compiled.append(function), function)[1])
    try:
        with load(folder, enabled) as engine:
            sample_and_train(engine)
    finally:
        token_sampling._compile.cache_clear()
    return bool(compiled)


def uses_threads(folder, enabled, monkeypatch):
    """A decode step while agents are busy, in a sampler with two threads."""
    monkeypatch.setattr(ThreadLoad, "measure", lambda self: 0.9)
    seen = set()
    with load(folder, enabled) as engine:
        sampler = engine.policy.sampler
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


def uses_last_mlp(folder, enabled, monkeypatch):
    with load(folder, enabled) as engine:
        places = []
        mlp = find_last_layer(engine.model.module).mlp
        mlp.register_forward_hook(lambda _, inputs, output: places.append(inputs[0].shape[:-1].numel()))
        (reply,) = ask(engine.policy, [request("a" * 200, max_tokens=1)])
    assert places in ([1], [reply.num_prompt_tokens])
    return places == [1]


def uses_garbage_collection(folder, enabled, monkeypatch):
    """The collector's thresholds while a run collects episodes."""
    thresholds = set()

    def reward(output, expected):
        thresholds.add(gc.get_threshold())
        return by_answer(output, expected)

    run = ScriptedRun(folder, reward=reward)
    run.settings["finetuning"]["policy"] = {"fast_paths": enabled}
    monkeypatch.setattr(garbage_collection, "_is_limited", False)
    gc.unfreeze()  # `tests/conftest.py` froze objects, which leaves the collector alone
    before = gc.get_threshold()
    try:
        asyncio.run(run.run())
    finally:
        gc.freeze()
    assert thresholds in ({THRESHOLDS}, {before})
    return thresholds == {THRESHOLDS}


def uses_fused_layers(folder, enabled, monkeypatch):
    with load_engine(folder, lora={"r": 2}, fast_paths=enabled) as engine:
        layers = [layer for name, layer in engine.model.module.named_modules() if name.endswith("_proj")]
        fused = {"forward" in vars(layer) for layer in layers}
    assert len(fused) == 1
    return fused == {True}


PROBES = {
    "decode": uses_decode,
    "attention": uses_attention,
    "torchscript": uses_torchscript,
    "threads": uses_threads,
    "last_mlp": uses_last_mlp,
    "fused_layers": uses_fused_layers,
    "garbage_collection": uses_garbage_collection,
}


def test_every_fast_path_has_a_probe():
    names = [field.name for field in fields(FastPaths) if field.name != "half_weights"]  # not a path of training
    assert list(PROBES) == names
    for enabled in (True, False):
        assert [getattr(FastPaths.switch(enabled), name) for name in names] == [enabled] * len(names)
    assert PolicyConfig().fast_paths


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("path", PROBES)
def test_the_switch_turns_every_fast_path_on_and_off(path, enabled, tiny_model_dir, tmp_path, monkeypatch):
    if DEVICE != "cpu" and path in ("attention", "torchscript"):
        pytest.skip("a path for CPUs alone")
    folder = tmp_path if path == "garbage_collection" else tiny_model_dir
    assert PROBES[path](folder, enabled, monkeypatch) == enabled
