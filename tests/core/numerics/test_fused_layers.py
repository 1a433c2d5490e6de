"""The formulas of fused layers against automatic differentiation of the layers that they replace."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from reinforge.config.policy import LoRAConfig
from reinforge.engine.model import fused_layers
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.fused_layers import GatedProduct, LoRALinear, RMSNorm, use_fused_layers
from reinforge.engine.model.loading import add_adapter
from reinforge.engine.training.shared_prefix import make_sharing_masks
from tests.engines import LIKELIHOOD, load_engine, train
from tests.samples import sibling_samples


def make_inputs(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_a_linear_layer_with_lora_has_the_right_gradients():
    x, down, up = make_inputs((3, 5), (2, 5), (4, 2))
    weight, bias = (each.detach() for each in make_inputs((4, 5), (4,)))
    expected = x @ weight.T + bias + 0.7 * x @ down.T @ up.T
    assert torch.allclose(LoRALinear.apply(x, weight, bias, down, up, 0.7), expected)

    def apply(x, down, up):
        return LoRALinear.apply(x, weight, None, down, up, 0.7)

    assert torch.autograd.gradcheck(apply, (x, down, up))


def test_a_gated_product_has_the_right_gradients():
    assert torch.autograd.gradcheck(GatedProduct.apply, make_inputs((2, 3), (2, 3)))


def test_rms_norm_has_the_right_values_and_gradients():
    x, weight = (each.detach().float().requires_grad_() for each in make_inputs((2, 3, 5), (5,)))
    fused = torch.autograd.grad((RMSNorm.apply(x, weight, 1e-5) ** 3).sum(), (x, weight))
    normed = nn.functional.rms_norm(x, [5], weight, 1e-5)
    assert torch.allclose(RMSNorm.apply(x, weight, 1e-5), normed, atol=1e-6)
    for ours, theirs in zip(fused, torch.autograd.grad((normed**3).sum(), (x, weight)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def make_module(folder, dtype=torch.float32, *, lora=True):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if lora:
        add_adapter(module, LoRAConfig(r=4), seed=0)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return module


def list_fused(module):
    return {type(layer).__name__ for layer in module.modules() if "forward" in vars(layer)}


def test_all_gradients_of_a_model_stay(tiny_model_dir):
    plain = make_module(tiny_model_dir)
    fused = copy.deepcopy(plain)
    use_fused_layers(fused, has_adapters=True)
    assert {"Linear"} < list_fused(fused)
    assert list_fused(plain) == set()
    token_ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    grads = []
    for module in (plain, fused):
        (module(input_ids=token_ids).logits ** 2).sum().backward()
        grads.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], rtol=1e-4, atol=1e-5 * grad.abs().max().item()), name


def test_weights_that_are_trained_in_full_in_float32_are_left_alone(tiny_model_dir):
    module = make_module(tiny_model_dir, lora=False)
    use_fused_layers(module, has_adapters=False)
    assert list_fused(module) == set()


def test_a_norm_whose_weights_are_still_1_is_replaced():
    """The squares of what it returns have a constant sum, whose gradient would be nothing but rounding errors."""
    norm = LlamaRMSNorm(64)
    assert fused_layers.is_fused_exact(norm, fused_layers.find_fused_forward(norm))


def test_a_layer_that_computes_something_else_is_left_alone(tiny_model_dir, monkeypatch):
    """Without the comparison, a norm that adds 1 to its weight, as Gemma's does, would lose the 1."""
    module = make_module(tiny_model_dir)
    norm = type(module.base_model.norm)
    right = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: right(self, x) + x)
    use_fused_layers(module, has_adapters=True)
    assert norm.__name__ not in list_fused(module)
    other = make_module(tiny_model_dir)
    monkeypatch.setattr(fused_layers, "is_fused_exact", lambda layer, fused: True)
    use_fused_layers(other, has_adapters=True)
    assert norm.__name__ in list_fused(other)


@pytest.mark.slow
def test_a_step_in_bfloat16_has_the_loss_and_the_direction_of_float32(tiny_model_dir):
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = {"dtype": dtype, "lora": {"r": 4}, "optimizer": {"name": "sgd"}}
        with load_engine(tiny_model_dir, device="cpu", **policy) as engine:
            before = {name: p.detach().clone() for name, p in engine.learner.masters.optimized.items()}
            report = train(engine, sibling_samples(), LIKELIHOOD)
            after = engine.learner.masters.optimized
            assert {p.dtype for p in after.values()} == {torch.float32}
            moved = torch.cat([(after[name] - p.float()).flatten() for name, p in sorted(before.items())])
            found[dtype] = report.metrics["loss"], moved
    assert found["bfloat16"][0] == pytest.approx(found["float32"][0], rel=0.02)
    assert torch.cosine_similarity(found["bfloat16"][1], found["float32"][1], dim=0) > 0.98


def test_prefixes_of_several_prompts_are_shared_with_adapters_too(tiny_model_dir):
    """A prompt that is nothing but what several share gives a layer no tokens of its own."""
    model = CausalModel(make_module(tiny_model_dir))
    use_fused_layers(model.module, has_adapters=True)
    masks = make_sharing_masks(model)
    assert masks is not None
    assert masks.shares_stems
