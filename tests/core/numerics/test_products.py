"""Products by oneDNN: the values and gradients of torch's own, where they are used, and where they are not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.model import products
from reinforge.engine.model.loading import load_model
from reinforge.engine.model.products import Product, multiply, use_faster_products
from tests.engines import LIKELIHOOD, load_engine, train
from tests.models import make_tiny_model
from tests.samples import sibling_samples


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory):
    """A model whose layers are large enough."""
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "m", "qwen2", **sizes)


@pytest.fixture
def is_faster(monkeypatch):
    """oneDNN is said to be faster, whatever this processor is."""
    monkeypatch.setattr(products, "measure_speedup", lambda num_inputs, num_outputs: 2.0)


def uses_onednn(module):
    return [name for name, layer in module.named_modules() if type(layer) is nn.Linear and "forward" in vars(layer)]


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_torch(rows, has_bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 160), (130, 160), (130,)))
    upstream = torch.randn((rows, 130), generator=generator)
    found = []
    for product in (Product.apply, F.linear):
        given = [each.clone().requires_grad_() for each in (x, weight, bias)][: 3 if has_bias else 2]
        output = product(*given, *([] if has_bias else [None]))
        found.append([output.detach(), *torch.autograd.grad(output, given, upstream)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_only_what_is_needed_is_computed(monkeypatch):
    calls = []
    monkeypatch.setattr(products, "multiply", lambda *given: (calls.append(len(given)), multiply(*given))[1])
    x, weight = torch.randn(40, 160, requires_grad=True), torch.randn(130, 160)
    Product.apply(x, weight, None).sum().backward()
    assert len(calls) == 2, "forward, and the gradient of the input"


@pytest.mark.parametrize("lora", [None, LoRAConfig(r=4)])
def test_a_step_has_the_loss_and_weights_of_torchs_own_products(lora, wide_model_dir, is_faster):
    found = []
    for enabled in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not enabled:
                patch.setattr(products, "measure_speedup", lambda num_inputs, num_outputs: 1.0)
            with load_engine(wide_model_dir, lora=lora, optimizer={"name": "sgd", "learning_rate": 0.1}) as engine:
                assert bool(uses_onednn(engine.model.module)) == enabled
                loss = train(engine, sibling_samples(), LIKELIHOOD).metrics["loss"]
                weights = {name: p.detach().clone() for name, p in engine.model.trained_parameters.items()}
                found.append((loss, weights))
    (fast, ours), (plain, theirs) = found
    assert fast == pytest.approx(plain, rel=1e-5)
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=1e-4, atol=1e-6), name


def test_it_is_left_out_where_it_is_not_faster_or_does_not_fit(wide_model_dir, tiny_model_dir, is_faster, monkeypatch):
    def load(folder, **settings):
        own = {key: settings.pop(key) for key in ("deterministic",) if key in settings}
        return load_model(PolicyConfig(model=str(folder), **settings), 0, "cpu", **own).module

    module = load(wide_model_dir)
    assert len([name for name in uses_onednn(module) if ".layers." in name]) == 2 * 7
    assert uses_onednn(copy.deepcopy(module)) == uses_onednn(module)
    assert not uses_onednn(load(wide_model_dir, deterministic=True)), "another number of rows may change the last bit"
    assert not uses_onednn(load(wide_model_dir, fast_paths=False))
    assert not uses_onednn(load(wide_model_dir, dtype="bfloat16"))
    assert not uses_onednn(load(tiny_model_dir)), "layers of 64 features"
    slow = load(wide_model_dir, fast_paths=False)
    use_faster_products(slow, lambda num_inputs, num_outputs: 1.1)
    assert not uses_onednn(slow)
    monkeypatch.setattr(products, "has_onednn", lambda: False)
    assert not uses_onednn(load(wide_model_dir)), "this torch was built without it"
    assert FastPaths().products


def test_the_measurement_is_a_ratio():
    assert 0.05 < products.measure_speedup(160, 130) < 50
