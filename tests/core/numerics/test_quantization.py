"""QLoRA: a frozen base in 4 bits under adapters, sampled, trained, saved and resumed; needs bitsandbytes."""

import numpy as np
import pytest
import torch

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model import preflight
from reinforge.engine.model.loading import load_model, load_module
from reinforge.engine.model.preflight import check_policy
from reinforge.engine.model.quantization import quantize_linear_layers
from reinforge.errors import ConfigError
from tests.engines import load_engine, measure_difference, train
from tests.samples import ask, request, trained_samples


@pytest.fixture(scope="module", autouse=True)
def _needs_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason='QLoRA is an extra: pip install "reinforge[qlora]"')


def load(folder, **settings):
    settings = {"quantization": "nf4", "lora": LoRAConfig(r=4), "max_num_seqs": 5, "keep_reference": True, **settings}
    return load_engine(folder, device="cpu", **settings)


def sample(engine):
    replies = ask(engine.policy, [request("a" * (1 + i), max_tokens=4 + i) for i in range(5)])
    samples = [each for reply in replies for each in trained_samples(reply.tokens)]
    for number, each in enumerate(samples):
        each.advantages = np.where(each.loss_mask, 1.0 - number % 2 * 2, 0.0).astype(np.float32)
    return samples


@pytest.mark.slow
def test_the_learner_computes_what_the_sampler_computes(tiny_model_dir):
    """Before and after a step, to 1e-5; and a single token as in a batch, which bitsandbytes has a kernel for."""
    with load(tiny_model_dir) as engine:
        for _ in range(2):
            samples = sample(engine)
            sampled = [each.sampling_logprobs for each in samples]
            assert measure_difference(engine.logprobs(samples), sampled) <= 1e-5
            frozen = {name: p.clone() for name, p in engine.model.module.named_parameters() if not p.requires_grad}
            report = train(engine, samples)
            assert report.num_updates == 1
            assert report.metrics["mismatch"] <= 1e-5
            for name, before in frozen.items():
                assert torch.equal(before, dict(engine.model.module.named_parameters())[name]), name


@pytest.mark.slow
def test_weights_in_4_bits_are_near_the_weights_that_were_loaded(tiny_model_dir):
    """Every linear layer but the output layer: an eighth of float32, and the product within 15 % of it."""
    plain, packed = (load_module(tiny_model_dir, torch.float32) for _ in range(2))
    quantize_linear_layers(packed, torch.device("cpu"))
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        before, after = (module.model.layers[1].get_submodule(name) for module in (plain, packed))
        assert after.weight.dtype == torch.uint8
        assert after.weight.numel() * 2 == before.weight.numel()
        assert 0.01 < ((after(x) - before(x)).norm() / before(x).norm()).item() < 0.15
    assert type(packed.lm_head) is torch.nn.Linear
    linear = sum(part.weight.numel() for part in plain.model.layers.modules() if isinstance(part, torch.nn.Linear))
    held, left = (sum(part.numel() * part.element_size() for part in each.parameters()) for each in (plain, packed))
    assert held - left == linear * 4 * 7 / 8


@pytest.mark.slow
def test_a_checkpoint_resumes_to_the_same_bits(tiny_model_dir, tmp_path):
    with load(tiny_model_dir) as engine:
        samples = sample(engine)
        train(engine, samples)
        engine.save(tmp_path / "saved", 1)
        train(engine, samples, progress=0.1)
        expected, parameters = engine.fingerprint(), engine.num_parameters
    assert not (tmp_path / "saved" / "model.safetensors").exists(), "the base stays where it is"
    with load(tiny_model_dir) as engine:
        assert engine.num_parameters == parameters
        engine.load_weights(tmp_path / "saved")
        train(engine, samples, progress=0.1)
        assert engine.fingerprint() == expected


def test_what_cannot_work_is_refused_before_work(tiny_model_dir, monkeypatch):
    plain = PolicyConfig(model=str(tiny_model_dir), quantization="nf4")
    assert "without lora nothing is trained" in str(check_policy(plain)[0])
    trained = PolicyConfig(model=str(tiny_model_dir), quantization="nf4", lora=LoRAConfig())
    assert not check_policy(trained)
    monkeypatch.setattr(preflight, "BITSANDBYTES", "a_package_that_is_missing")
    assert "reinforge[qlora]" in str(check_policy(trained)[0])
    with pytest.raises(ConfigError, match="mps cannot multiply with weights in 4 bits"):
        quantize_linear_layers(load_module(tiny_model_dir, torch.float32), torch.device("mps"))


def test_the_kernel_that_learners_do_not_use_is_off(tiny_model_dir):
    """Mutation check: with it, on CPUs that have AVX512-BF16, passes without gradient use other weights."""
    config = PolicyConfig(model=str(tiny_model_dir), quantization="nf4", lora=LoRAConfig(r=4))
    layers = [part for part in load_model(config, 0, "cpu").module.modules() if type(part).__name__ == "Linear4bit"]
    assert layers
    assert not any(getattr(part, "support_avx512bf16_for_cpu", False) for part in layers)
