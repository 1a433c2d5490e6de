"""Adapters: what is trained is what PEFT loads, merges and switches off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.config.schema import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import ConfigError, EngineError
from reinforge.interfaces import Needs
from reinforge.types.sample import LossSpec
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sibling_samples


def load(folder, keep_reference=False, **config):
    settings = PolicyConfig(model=str(folder), lora=LoRAConfig(rank=4, alpha=8), max_batch=5, **config)
    settings.optimizer.learning_rate = 1e-2
    return Engine.load(settings, seed=0, device="cpu", keep_reference=keep_reference)


def train(engine, samples):
    engine.begin_job()
    engine.update(samples, LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
    engine.end_job()
    engine.policy.open(1)


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def base(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


def test_sampler_learner_peft_and_merged_weights_agree(base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = sibling_samples()
    with load(base) as engine:
        before = engine.logprobs(samples)
        train(engine, samples)
        trained = engine.logprobs(samples)
        assert max(np.abs(a - b).max() for a, b in zip(before, trained, strict=True)) > 0.01
        replies = ask(engine.policy, [request("a" * n) for n in range(1, 6)])
        rescored = engine._score_tokens([r.tokens.prompt_token_ids + r.tokens.token_ids for r in replies])
        for reply, scored in zip(replies, rescored, strict=True):
            assert np.abs(scored[-len(reply.tokens.token_ids) :] - reply.tokens.logprobs).max() <= 1e-5
        engine.save(tmp_path / "a", 1)
        fingerprint = engine.fingerprint()
    assert not (tmp_path / "a" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "a")
    for model in (loaded, loaded.merge_and_unload()):
        for sample, logprobs in zip(samples, trained, strict=True):
            ids = torch.from_numpy(sample.token_ids)[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0]
            for t in np.flatnonzero(sample.loss_mask):
                scaled = torch.log_softmax(logits[t - 1] / float(sample.temperatures[t]), -1)
                assert scaled[ids[0, t]].item() == pytest.approx(float(logprobs[t]), abs=2e-5)
    with Engine.load(PolicyConfig(model=str(tmp_path / "a")), seed=0, device="cpu") as again:
        assert again.fingerprint() == fingerprint
        assert set(again.learner.parameters) == {n for n in again.learner.parameters if "lora_" in n} != set()


def test_the_reference_is_the_model_without_its_adapters(base):
    samples = sibling_samples()
    with load(base, keep_reference=True) as engine:
        assert engine.reference is None, "no second copy in memory"
        before = engine.logprobs(samples)
        train(engine, samples)
        engine.begin_job()
        engine.score(samples, Needs(ref_logprobs=True))
        engine.rollback()
        for sample, plain in zip(samples, before, strict=True):
            assert np.array_equal(sample.ref_logprobs, plain)


def test_only_adapters_move_and_a_rollback_puts_them_back(base):
    with load(base) as engine:
        frozen = {n: p.clone() for n, p in engine.model.module.named_parameters() if "lora_" not in n}
        first = engine.fingerprint()
        train(engine, sibling_samples())
        assert engine.fingerprint() != first
        assert all(torch.equal(p, frozen[n]) for n, p in engine.model.module.named_parameters() if n in frozen)
        second = engine.fingerprint()
        engine.begin_job()
        engine.update(sibling_samples(), LossSpec("cross_entropy"), progress_start=0, progress_end=1)
        engine.rollback()
        assert engine.fingerprint() == second


def test_other_adapters_are_refused(base, tmp_path):
    with load(base) as engine:
        engine.save(tmp_path / "four", 1)
        engine.config.lora = None
    settings = PolicyConfig(model=str(base), lora=LoRAConfig(rank=2))
    with Engine.load(settings, seed=0, device="cpu") as engine, pytest.raises(EngineError, match="another rank"):
        engine.load_weights(tmp_path / "four")
    with pytest.raises(ConfigError, match=r"target_modules.*nowhere|nowhere.*target_modules|not found"):
        Engine.load(PolicyConfig(model=str(base), lora=LoRAConfig(target_modules=["nowhere"])), seed=0, device="cpu")
