"""Layers of large models with one backward formula each: linear layers with LoRA, RMSNorm and the gated MLP.

Automatic differentiation keeps the result of every small operation and runs over it again: in a step that trains LoRA
adapters in bfloat16, that takes as long as the matrix products. The formulas here keep the layer's inputs only. They
replace `forward` of the modules that they fit; each kind of module is first compared with its own forward and backward
pass, and stays unchanged where they differ (`use_fused_layers`). Weights, adapters and hooks remain PEFT's and
transformers', and small models in float32 without adapters are left alone.

Norms are computed in float32; products have the type of the weights, whose kernels sum in float32.
Shapes: M tokens, I inputs, O outputs, R rank, H features.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

logger = logging.getLogger(__name__)
MULTIPLY = "multiply"  # attribute of a linear layer: what computes its products, if not `F.linear`


class LoRALinear(Function):
    """`(x [M, I], weight [O, I], bias [O], down [R, I], up [O, R], scale) -> x weight^T + bias + scale x down^T up^T`.

    PEFT's own forward makes three tensors of the output's size, and keeps two of them. The last argument computes the
    products with the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        down_RI: Tensor,
        up_OR: Tensor,
        scale: float,
        multiply: Callable[..., Tensor] = F.linear,
    ) -> Tensor:
        """Returns the output; saves the input and its product with `down`."""
        x_MI = x.reshape(-1, x.shape[-1])
        low_MR = x_MI @ down_RI.T
        output_MO = multiply(x_MI, weight_OI, bias_O).addmm_(low_MR, up_OR.T, alpha=scale)
        ctx.scale, ctx.shape, ctx.multiply = scale, x.shape, multiply
        ctx.save_for_backward(x_MI, low_MR, weight_OI, down_RI, up_OR)
        return output_MO  # no view of it, which a module could not overwrite

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the input and of the adapter; the weight is frozen."""
        x_MI, low_MR, weight_OI, down_RI, up_OR = ctx.saved_tensors
        grad_MO = gradients[0].reshape(-1, len(weight_OI))
        low_grad_MR = (grad_MO @ up_OR).mul_(ctx.scale)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = ctx.multiply(grad_MO, weight_OI.T).addmm_(low_grad_MR, down_RI).view(ctx.shape)
        down_grad = low_grad_MR.T @ x_MI if ctx.needs_input_grad[3] else None
        up_grad = (grad_MO.T @ low_MR).mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        return x_grad, None, None, down_grad, up_grad, None, None


class RMSNorm(Function):
    """`(x [..., H], weight [H], eps) -> weight x / sqrt(mean(x^2) + eps)`.

    With n = x / rms(x) and g the gradient of n: dx = (g - n mean(g n)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Returns the output in the type of the weight; saves the input and one number per token."""
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scales = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scales)
        return (x * scales).to(weight_H.dtype).mul_(weight_H)  # rounded where transformers rounds

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Returns the gradients of input and weight."""
        x, weight_H, scales = ctx.saved_tensors
        normed = x * scales
        grad = gradients[0].float()
        weight_grad = (grad * normed).flatten(0, -2).sum(0).to(weight_H.dtype) if ctx.needs_input_grad[1] else None
        grad = grad * weight_H
        means = (grad * normed).mean(dim=-1, keepdim=True)
        return grad.sub_(normed.mul_(means)).mul_(scales).to(x.dtype), weight_grad, None


class GatedProduct(Function):
    """`(gate, up) -> silu(gate) up`; keeps the two inputs only."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradients[0] * up, gate), F.silu(gate).mul_(gradients[0])


def _forward_lora(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = self.active_adapters
    is_plain = not (args or kwargs or self.disable_adapters or self.merged) and len(names) == 1
    if not is_plain or names[0] not in self.lora_A or x.dtype != self.base_layer.weight.dtype:
        return type(self).forward(self, x, *args, **kwargs)
    name, base = names[0], self.base_layer
    weights = self.lora_A[name].weight, self.lora_B[name].weight
    multiply = vars(base).get(MULTIPLY, F.linear)
    output_MO = LoRALinear.apply(x.flatten(0, -2), base.weight, base.bias, *weights, self.scaling[name], multiply)
    return output_MO.view(*x.shape[:-1], len(base.weight))  # also of no tokens, from which -1 cannot be told


def _forward_norm(self: Any, x: Tensor) -> Tensor:
    return RMSNorm.apply(x, self.weight, self.variance_epsilon)


def _forward_gated_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(GatedProduct.apply(self.gate_proj(x), self.up_proj(x)))


def use_fused_layers(module: nn.Module, *, has_adapters: bool) -> None:
    """Replaces `forward` of the layers that a formula here fits, where the model has adapters or low precision.

    Args:
        has_adapters: Adapters are trained and the model's own weights are frozen.
    """
    if not has_adapters and next(module.parameters()).dtype.itemsize >= 4:
        return
    verdicts: dict[tuple[Any, ...], bool] = {}
    for layer in module.modules():
        fused = find_fused_forward(layer)
        if fused is None:
            continue
        key = (type(layer), *(p.shape for p in layer.parameters()))
        if key not in verdicts:
            verdicts[key] = is_fused_exact(layer, fused)
        if verdicts[key]:
            layer.forward = FusedForward(fused, layer)


class FusedForward:
    """A formula as the `forward` of a layer, which it does not keep alive, as a method in the layer itself would."""

    def __init__(self, fused: Callable[..., Tensor], layer: nn.Module):
        self._fused, self._layer = fused, ref(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._fused(self._layer(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        return FusedForward(self._fused, memo[id(self._layer())])  # the copy of the layer, whose attribute this is


def find_fused_forward(layer: Any) -> Callable[..., Tensor] | None:
    """Returns the formula that may fit a layer, by its parts alone."""
    if "forward" in vars(layer):
        return None
    if type(layer).__name__.endswith("RMSNorm") and hasattr(layer, "variance_epsilon"):
        return _forward_norm
    parts = {name for name, _ in layer.named_children()}
    if parts == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _forward_gated_mlp
    if type(layer).__module__.startswith("peft.") and _has_plain_lora(layer):
        return _forward_lora
    return None


def _has_plain_lora(layer: Any) -> bool:
    """Returns True for PEFT's linear layer over torch's own, without dropout, variants or biases of adapters."""
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or type(layer.base_layer) is not nn.Linear or layer.base_layer.weight.requires_grad:
        return False
    is_plain = not (layer.lora_variant or layer.fan_in_fan_out or any(layer.lora_bias.values()))
    parts = [*layer.lora_A.values(), *layer.lora_B.values()]
    same = all(part.weight.dtype == layer.base_layer.weight.dtype for part in parts)
    return is_plain and same and all(type(part) is nn.Identity for part in layer.lora_dropout.values())


@contextmanager
def _fill_adapters(layer: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Fills the second halves of adapters, which begin as 0, with random numbers inside the block."""
    ups = [p for name, p in layer.named_parameters() if ".lora_B." in f".{name}"]
    before = [p.detach().clone() for p in ups]
    for p in ups:
        p.data.copy_(torch.randn(p.shape, generator=generator))
    try:
        yield
    finally:
        for p, saved in zip(ups, before, strict=True):
            p.data.copy_(saved)


def is_fused_exact(layer: Any, fused: Callable[..., Tensor]) -> bool:
    """Returns True if a formula gives a layer's own output and gradients on a few numbers; else logs why not."""
    first = next(layer.parameters())
    size = first.shape[-1]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 3, size, generator=generator).to(first)
    results = []
    try:
        for forward in (type(layer).forward, fused):
            x = numbers.clone().requires_grad_()
            with torch.enable_grad(), _fill_adapters(layer, generator.manual_seed(1)):
                output = forward(layer, x)
                # not the sum of squares, which a norm keeps constant: its gradient is nothing but rounding errors
                upstream = torch.randn(output.shape, generator=generator).to(output)
                (grad,) = torch.autograd.grad(output, x, upstream)
            results.append((output.detach().float(), grad.float()))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as cause:
        logger.info("%s: using its own forward pass (slower): %s", type(layer).__name__, cause)
        return False
    limit = 1e-5 if first.dtype == torch.float32 else 0.03
    errors = [(a - b).abs().max().item() / max(1e-6, a.abs().max().item()) for a, b in zip(*results, strict=True)]
    if max(errors) <= limit:
        return True
    logger.info("%s: using its own forward pass (slower): results differ by %g", type(layer).__name__, max(errors))
    return False
