"""Adapters: PEFT loads, merges and switches off exactly what was trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import ConfigError, EngineError
from reinforge.types.sample import LossSpec, Needs
from tests.device import DEVICE
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, request, sibling_samples


def load(folder, keep_reference=False, **config):
    settings = PolicyConfig(model=str(folder), lora=LoRAConfig(r=4, lora_alpha=8), max_num_seqs=5, **config)
    settings.optimizer.learning_rate = 1e-2
    return Engine.load(settings, seed=0, device=DEVICE, keep_reference=keep_reference)


def train(engine, samples):
    engine.begin_job()
    engine.update(samples, LossSpec("cross_entropy"), progress_start=0.5, progress_end=0.5)
    engine.end_job()
    engine.policy.open(1)


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def base(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


@pytest.mark.parametrize("fast_paths", [True, False])
def test_sampler_learner_peft_and_merged_weights_agree(base, tmp_path, fast_paths):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = sibling_samples()
    with load(base, fast_paths=fast_paths) as engine:
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
    with Engine.load(PolicyConfig(model=str(tmp_path / "a")), seed=0, device=DEVICE) as again:
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
    settings = PolicyConfig(model=str(base), lora=LoRAConfig(r=2))
    with Engine.load(settings, seed=0, device=DEVICE) as engine, pytest.raises(EngineError, match="another rank"):
        engine.load_weights(tmp_path / "four")
    with pytest.raises(ConfigError, match=r"target_modules.*nowhere|nowhere.*target_modules|not found"):
        Engine.load(PolicyConfig(model=str(base), lora=LoRAConfig(target_modules=["nowhere"])), seed=0, device=DEVICE)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("untied"), "llama", **FAMILIES["llama"])


def load_lora(folder, keep_reference=False, **lora):
    settings = PolicyConfig(model=str(folder), lora=LoRAConfig(r=4, lora_alpha=8, **lora), max_num_seqs=5)
    settings.optimizer.learning_rate = 1e-2
    return Engine.load(settings, seed=0, device=DEVICE, keep_reference=keep_reference)


def largest_difference(first, second):
    return max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))


def plain_logprobs(model, samples):
    """log p of each sample's trained tokens by a plain forward pass, `[T]` each, 0 elsewhere."""
    rows = []
    for sample in samples:
        ids, row = torch.from_numpy(sample.token_ids)[None], np.zeros(len(sample), np.float32)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        for t in np.flatnonzero(sample.loss_mask):
            row[t] = torch.log_softmax(logits[t - 1] / float(sample.temperatures[t]), -1)[ids[0, t]].item()
        rows.append(row)
    return rows


def check_sampler_equals_learner(engine):
    replies = ask(engine.policy, [request("a" * n) for n in range(1, 6)])
    rescored = engine._score_tokens([r.tokens.prompt_token_ids + r.tokens.token_ids for r in replies])
    for reply, scored in zip(replies, rescored, strict=True):
        assert np.abs(scored[-len(reply.tokens.token_ids) :] - reply.tokens.logprobs).max() <= 1e-5


LORA_SETTINGS = [
    {"use_rslora": True},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens"], "use_rslora": True},
    {"modules_to_save": ["embed_tokens", "lm_head", "mlp", "model.norm"]},
]


@pytest.mark.parametrize("lora", LORA_SETTINGS, ids=str)
def test_an_adapter_with_these_settings_trains_saves_and_reloads(untied, tmp_path, lora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    samples = sibling_samples()
    with load_lora(untied, **lora) as engine:
        before = engine.logprobs(samples)
        check_sampler_equals_learner(engine)
        train(engine, samples)
        trained, fingerprint = engine.logprobs(samples), engine.fingerprint()
        assert largest_difference(before, trained) > 0.01
        check_sampler_equals_learner(engine)
        saved_whole = {
            name.partition(".modules_to_save")[0] for name in engine.learner.parameters if "lora_" not in name
        }
        for name in lora.get("modules_to_save", []):
            assert any(f".{path}".endswith(f".{name}") for path in saved_whole)
        engine.save(tmp_path / "a", 1)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32), tmp_path / "a")
    assert largest_difference(plain_logprobs(plain, samples), trained) <= 2e-5
    assert largest_difference(plain_logprobs(plain.merge_and_unload(), samples), trained) <= 2e-5
    with load_lora(untied, **lora) as engine:
        engine.load_weights(tmp_path / "a")
        assert engine.fingerprint() == fingerprint
        assert largest_difference(engine.logprobs(samples), trained) == 0
        check_sampler_equals_learner(engine)
    with Engine.load(PolicyConfig(model=str(tmp_path / "a")), seed=0, device=DEVICE) as engine:
        assert engine.fingerprint() == fingerprint
        assert {name.partition(".modules_to_save")[0] for name in engine.learner.parameters if "lora_" not in name} == (
            saved_whole
        )
        train(engine, samples)
        assert engine.fingerprint() != fingerprint


def test_rslora_scales_by_the_root_of_the_rank(untied):
    """With r 4 and lora_alpha 8 an adapter's output is multiplied by 8 / sqrt(4) = 4, not by 8 / 4 = 2."""
    for use_rslora, scaling in ((False, 2.0), (True, 4.0)):
        with load_lora(untied, use_rslora=use_rslora) as engine:
            layers = [part for part in engine.model.module.modules() if hasattr(part, "lora_A")]
            assert {layer.scaling["default"] for layer in layers} == {scaling}


def test_an_adapter_of_another_scaling_is_refused(untied, tmp_path):
    with load_lora(untied) as engine:
        engine.save(tmp_path / "plain", 1)
    with load_lora(untied, use_rslora=True) as engine, pytest.raises(EngineError, match="with use_rslora False, but"):
        engine.load_weights(tmp_path / "plain")


def test_the_reference_has_the_original_modules(untied):
    """transformers switches saved modules off with the adapters, but not on again."""
    samples = sibling_samples()
    with load_lora(untied, keep_reference=True, modules_to_save=["lm_head", "embed_tokens"]) as engine:
        before = engine.logprobs(samples)
        train(engine, samples)
        trained = engine.logprobs(samples)
        engine.begin_job()
        engine.score(samples, Needs(ref_logprobs=True))
        engine.rollback()
        assert largest_difference([sample.ref_logprobs for sample in samples], before) == 0
        assert largest_difference(engine.logprobs(samples), trained) == 0
        names = set(engine.learner.parameters)
        assert names == set(engine.model.trained_parameters)
        check_sampler_equals_learner(engine)


def test_a_rollback_restores_saved_modules(untied):
    with load_lora(untied, modules_to_save=["lm_head"]) as engine:
        before = engine.fingerprint()
        frozen = {n: p.clone() for n, p in engine.model.module.named_parameters() if not p.requires_grad}
        engine.begin_job()
        engine.update(sibling_samples(), LossSpec("cross_entropy"), progress_start=0, progress_end=1)
        assert engine.fingerprint() != before
        assert all(torch.equal(p, frozen[n]) for n, p in engine.model.module.named_parameters() if n in frozen)
        engine.rollback()
        assert engine.fingerprint() == before


def test_dropout_is_refused():
    assert LoRAConfig(lora_dropout=0).lora_dropout == 0
    with pytest.raises(ValueError, match=r"lora_dropout is 0\.1.*log-probs differ from the sampler's; remove it"):
        LoRAConfig(lora_dropout=0.1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm_hed", r'modules_to_save: the model has no module "lm_hed", did you mean "lm_head"\?'),
        ("norm", r'"norm" also matches model\.layers\.0\.input_layernorm.*\n.*such as model\.norm'),
        ("layers", r"modules_to_save: No modules were targeted"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused(untied, name, message):
    with pytest.raises(ConfigError, match=message):
        load_lora(untied, modules_to_save=[name])


@pytest.mark.parametrize(("family", "name"), [("qwen2", "lm_head"), ("gemma2", "embed_tokens"), ("gpt2", "wte")])
def test_tied_embeddings_are_refused(tmp_path, family, name):
    base = make_tiny_model(tmp_path, family, **FAMILIES[family])
    with pytest.raises(ConfigError, match=rf"modules_to_save: .*{name}.weight and .* are tied \(one tensor\)"):
        load_lora(base, modules_to_save=[name])


def test_what_the_files_show_is_refused_before_loading(untied, tmp_path):
    from reinforge.engine.model.preflight import check_adapters, check_policy

    def check(folder, *names):
        config = PolicyConfig(model=str(folder), lora=LoRAConfig(modules_to_save=list(names)))
        return [str(problem) for problem in check_policy(config)]

    assert check(untied, "lm_head", "embed_tokens", "mlp", "model.norm", "layers.0") == []
    [problem] = check(untied, "lm_head", "embd_tokens")
    assert "modules_to_save: " in problem
    assert 'has no module "embd_tokens", did you mean "embed_tokens"?' in problem
    [problem] = check(make_tiny_model(tmp_path, "qwen2", **FAMILIES["qwen2"]), "lm_head")
    assert "ties lm_head to embed_tokens" in problem
    assert check(make_tiny_model(tmp_path / "gpt2", "gpt2", **FAMILIES["gpt2"]), "transformer.h") == []
    several = PolicyConfig(model=str(untied), lora=LoRAConfig(modules_to_save=["lm_head"]))
    [problem] = [str(problem) for problem in check_adapters(several, ["a", "b"], critic=False)]
    assert "lm_head cannot be trained in full for several adapters (a, b)" in problem
    assert check_adapters(several, ["a"], critic=False) == []
    with pytest.raises(ConfigError, match="several adapters"):
        Engine.load(several, seed=0, device=DEVICE, adapters=("a", "b"))
