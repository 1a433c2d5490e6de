"""Linear layers as decode steps multiply them: concatenated, packed for the CPU's matrix kernels, adapters beside them.

A decode step multiplies few rows with every weight of the model, so it takes as long as reading the weights, and a
kernel that first rearranges them reads them twice. oneDNN multiplies weights that were rearranged once: for SmolLM2's
shapes and 64 rows in bfloat16 1.0 to 1.2 times as fast as torch's own product, for 1 row twice as fast; in float32 2.1
to 2.7 and 1.0 to 1.8 times, on a CPU where torch's own product is MKL's (docs/performance.md). In bfloat16 its results
are the own product's to the last bit, whatever the number of rows.

LoRA adapters stay beside the weights: added to weights in bfloat16, most of an early adapter would be rounded away, and
the sampled policy would not be the trained one. Layers with the same input are one product, and so are their adapters:

    q, k, v = x [W_q; W_k; W_v]^T + (x [A_q; A_k; A_v]^T) [s B_q, 0, 0; 0, s B_k, 0; 0, 0, s B_v]^T

Shapes: M rows, I inputs, O outputs of all layers together, R ranks of all adapters together.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_PACKED_SHARE = 0.25
"""Maximum memory of packed weights, as a share of the machine's."""

UNKNOWN_MEMORY = 8 * 2**30
"""The machine's memory where the system does not say."""

MAX_COPIED_BYTES = 64 * 2**20
"""Maximum memory of concatenated weights where they are not packed: larger products take all the time anyway."""


class Projection(NamedTuple):
    """Linear layers with the same input, as one.

    Attributes:
        weight: `[O, I]`, packed or plain.
        bias: `[O]`.
        down: Of all adapters, `[R, I]`; None: the layers have no adapters.
        up: Each adapter's in the rows of its layer and the columns of its ranks, times its scaling, `[O, R]`.
    """

    weight: Tensor
    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None


def project(x: Tensor, layer: Projection) -> Tensor:
    """Returns the layers' outputs, `[M, O]`, of `x`, `[M, I]`; compiled by TorchScript, too."""
    output = multiply(x, layer.weight, layer.bias)
    down, up = layer.down, layer.up
    if down is not None and up is not None:
        output.add_(multiply(multiply(x, down, None), up, None))
    return output


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x weight^T + bias`, `[M, O]`; compiled by TorchScript, too."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns True if this torch packs weights of this type for this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def find_max_bytes(device: torch.device, dtype: torch.dtype) -> int:
    """Returns the maximum memory of the copies that `pack` may make of one model's weights."""
    if not can_pack(device, dtype):
        return MAX_COPIED_BYTES
    has_sysconf = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_sysconf else UNKNOWN_MEMORY
    return int(memory * MAX_PACKED_SHARE)


def pack(weight: Tensor) -> Tensor:
    """Returns a weight, `[O, I]`, packed where `can_pack`; else as it is."""
    if not can_pack(weight.device, weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def get_linear(layer: Any) -> nn.Linear | None:
    """Returns the plain linear layer inside of a layer, which may have a LoRA adapter; None: it is something else."""
    if type(layer) is nn.Linear:
        return layer
    base: Any = getattr(layer, "base_layer", None)
    names: Sequence[str] = getattr(layer, "active_adapters", ())
    if type(base) is not nn.Linear or len(names) != 1 or len(layer.lora_A) > 1 or getattr(layer, "lora_variant", None):
        return None
    if any(name in layer.lora_A for name in names) and not _is_plain_lora(layer, names[0]):
        return None
    return base


def _is_plain_lora(layer: Any, name: str) -> bool:
    """Returns True if an adapter adds s B A x to its layer and nothing else."""
    parts = layer.lora_A[name], layer.lora_B[name]
    if any(type(part) is not nn.Linear or part.bias is not None for part in parts):
        return False
    return not layer.merged and not layer.disable_adapters and type(layer.lora_dropout[name]) is nn.Identity


@torch.no_grad()
def collect_projection(layers: Sequence[Any]) -> Projection:
    """Returns layers for which `get_linear` finds one, and which have the same input, as one."""
    linears = [linear for linear in map(get_linear, layers) if linear is not None]
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    down, up = _collect_adapters(layers, weights)
    return Projection(
        weight=pack(weights[0] if len(weights) == 1 else torch.cat(weights)),
        bias=torch.cat(biases) if biases else None,
        down=down,
        up=up,
    )


def _collect_adapters(layers: Sequence[Any], weights: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Returns `down` and `up` of a `Projection`.

    Example: layers of 2 and 3 outputs, the second with an adapter of rank 1, B = [1, 2, 3], scaling 2
        => up [[0], [0], [2], [4], [6]]
    """
    downs, ups, row = [], [], 0
    size = sum(len(weight) for weight in weights)
    for layer, weight in zip(layers, weights, strict=True):
        for name in getattr(layer, "lora_A", {}):
            own = layer.lora_B[name].weight.detach() * layer.scaling[name]
            up = weight.new_zeros(size, own.shape[1])
            up[row : row + len(weight)] = own
            downs.append(layer.lora_A[name].weight.detach().to(weight.dtype))
            ups.append(up)
        row += len(weight)
    return (pack(torch.cat(downs)), pack(torch.cat(ups, dim=1))) if downs else (None, None)
