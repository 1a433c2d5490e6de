"""Products with weights while a model trains or scores, by the faster of torch's two libraries.

In float32 torch multiplies by MKL, which uses AVX2 alone on AMD's processors, and oneDNN uses AVX-512: for SmolLM2's
shapes it is 2.2 times as fast in the forward pass and for the gradients of inputs, 1.8 times for those of weights (Zen
5). On Intel's they are equal. A short measurement decides; deterministic engines keep torch's own choice.

Shapes: M tokens, I inputs, O outputs.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from reinforge.engine.model.fused_layers import MULTIPLY, FusedForward

logger = logging.getLogger(__name__)

MIN_FEATURES = 128  # smaller layers take as long as calling a formula of our own
MIN_ROWS = 32  # of fewer, rearranging the weight takes longer than the product; and oneDNN refuses 0
MIN_SPEEDUP = 1.2
TIMED_ROWS = 512


def multiply(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Returns `x weight^T + bias`, `[M, O]`, by oneDNN if there are enough numbers."""
    if min(x_MI.shape) < MIN_ROWS or x_MI.dtype != torch.float32:
        return F.linear(x_MI, weight_OI, bias_O)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, bias_O, "none", [], "")
    return product


class Product(Function):
    """`(x [M, I], weight [O, I], bias [O]) -> x weight^T + bias`."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MI, weight_OI)
        return multiply(x_MI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of input, weight and bias."""
        x_MI, weight_OI = ctx.saved_tensors
        grad_MO, (needs_x, needs_weight, needs_bias) = gradients[0], ctx.needs_input_grad
        x_grad = multiply(grad_MO, weight_OI.T) if needs_x else None
        weight_grad = multiply(grad_MO.T, x_MI.T) if needs_weight else None
        return x_grad, weight_grad, grad_MO.sum(0) if needs_bias else None


def _forward_linear(self: Any, x: Tensor) -> Tensor:
    output_MO: Tensor = Product.apply(x.flatten(0, -2), self.weight, self.bias)
    return output_MO.view(*x.shape[:-1], len(self.weight))


def use_faster_products(module: nn.Module, measure: Callable[[int, int], float] | None = None) -> None:
    """Lets a float32 model's linear layers multiply by oneDNN where that is faster on this CPU.

    Args:
        measure: Returns by how much, for a layer's inputs and outputs; None: measures it.
    """
    measure = measure or measure_speedup
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    first = next((layer for layer in layers if min(layer.weight.shape) >= MIN_FEATURES), None)
    if first is None or first.weight.dtype != torch.float32 or not has_onednn():
        return
    if (speedup := measure(first.in_features, first.out_features)) < MIN_SPEEDUP:
        return
    logger.info("float32 products by oneDNN, %.1f x as fast as torch's own here", speedup)
    for layer in layers:
        if min(layer.weight.shape) >= MIN_FEATURES:
            layer.forward = FusedForward(_forward_linear, layer)  # type: ignore[method-assign]
            setattr(layer, MULTIPLY, multiply)


def has_onednn() -> bool:
    is_on = bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    return is_on and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def measure_speedup(num_inputs: int, num_outputs: int) -> float:
    """Returns the time of torch's own product divided by oneDNN's: the median of five pairs, in a thread that ends."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measure, num_inputs, num_outputs).result()


@torch.no_grad()
def _measure(num_inputs: int, num_outputs: int) -> float:
    x, weight, ratios = torch.ones(TIMED_ROWS, num_inputs), torch.ones(num_outputs, num_inputs), []
    for number in range(6):
        seconds = []
        for function in (F.linear, multiply):
            started = time.perf_counter()
            function(x, weight)
            seconds.append(time.perf_counter() - started)
        if number:  # the first one prepares the kernels
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)
