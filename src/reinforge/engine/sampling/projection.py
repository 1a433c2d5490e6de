"""Linear layers as decode steps multiply them: concatenated, packed for the CPU's matrix kernels, adapters beside them.

A decode step multiplies few rows with every weight of the model, so it takes as long as reading the weights, and a
kernel that first rearranges them reads them twice. oneDNN multiplies weights that were rearranged once: for SmolLM2's
shapes and 64 rows in bfloat16 1.0 to 1.2 times as fast as torch's own product, for 1 row twice as fast; in float32 2.1
to 2.7 and 1.0 to 1.8 times, on a CPU where torch's own product is MKL's (docs/performance.md). In bfloat16 its results
are the own product's to the last bit, whatever the number of rows.

Where nothing is trained, the weights of a float32 model may be packed in float16 (`pack_half`): FBGEMM reads half the
bytes and computes in float32, for SmolLM2's shapes 2.5 times as fast for 1 row, 2 times for 4 and 1.2 for 64. Rounding
the weights changes log-probs of SmolLM2 by a mean of 0.002.

LoRA adapters stay beside the weights: added to weights in bfloat16, most of an early adapter would be rounded away, and
the sampled policy would not be the trained one. Layers with the same input are one product, and so are their adapters:

    q, k, v = x [W_q; W_k; W_v]^T + (x [A_q; A_k; A_v]^T) [s B_q, 0, 0; 0, s B_k, 0; 0, 0, s B_v]^T

Several adapters multiply the same product of the weights, each only its own rows.

Shapes: M rows, I inputs, O outputs of all layers together, R ranks of one adapter in all layers together.
"""

# No `from __future__ import annotations`: TorchScript reads the annotations of these types.

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.sampling.kv_cache import MIN_ROWS


class AdapterRows(NamedTuple):
    """Rows in the order of their adapters."""

    order: Tensor | None  # the row of the batch at each place of the order; None: the batch is in this order
    places: Tensor | None  # the place of each row of the batch
    counts: list[int]  # rows of each adapter
    min_rows: int
    """Each adapter multiplies at least this many rows, and the results of rows that are not its own are dropped: with
    fewer rows, the last bit of a product depends on their number."""


def order_rows(names: Sequence[str], device: torch.device, min_rows: int) -> tuple[tuple[str, ...], AdapterRows]:
    """Returns the adapters of a batch, and the rows of each."""
    adapters = tuple(sorted(set(names)))
    if len(adapters) == 1:
        return adapters, AdapterRows(None, None, [len(names)], min_rows)
    order = torch.tensor(sorted(range(len(names)), key=names.__getitem__))
    counts = [names.count(name) for name in adapters]
    return adapters, AdapterRows(order.to(device), order.argsort().to(device), counts, min_rows)


def pick_rows(states: Tensor, indices: Tensor | None) -> Tensor:
    """Returns these rows of a tensor, or all for None; compiled by TorchScript, too."""
    return states if indices is None else states.index_select(0, indices)


MAX_PACKED_SHARE = 0.25  # maximum memory of packed or concatenated weights, as a share of the machine's or the GPU's

UNKNOWN_MEMORY = 8 * 2**30  # the machine's memory where the system does not say

MIN_HALVED = 20_000_000
"""Smallest model, in parameters, that is decoded from weights in float16: a smaller one stays in the caches."""

MAX_HALF = 65504.0  # largest number of float16

MAX_COPIED_BYTES = 64 * 2**20
"""Maximum memory of concatenated weights where they are not packed: larger products take all the time anyway."""


class Weight(NamedTuple):
    """The weight of a product, `[O, I]`, in one of three forms."""

    plain: Tensor  # packed by oneDNN, or plain; `[0]` if `half` has the weight
    # packed with its bias in float16 by FBGEMM; TorchScript knows no `| None` for a class of its own
    half: Optional[torch.classes.quantized.LinearPackedParamsBase]  # type: ignore[name-defined]  # noqa: UP045


class Projection(NamedTuple):
    """Linear layers with the same input, as one."""

    weight: Weight
    bias: Tensor | None  # `[O]`
    downs: list[Tensor]  # of each adapter, `[R, I]`; `[0, I]` where the layers do not have it
    ups: list[Tensor]  # of each adapter, `[O, R]`: its B in the rows and columns of its layers, times its scaling


def project(x: Tensor, layer: Projection, rows: AdapterRows) -> Tensor:
    """Returns the layers' outputs, `[M, O]`; compiled by TorchScript, too.

    Args:
        x: `[M, I]`, in the order of `rows`.
    """
    output, first = multiply(x, layer.weight, layer.bias), 0
    for number, count in enumerate(rows.counts):
        down, up = layer.downs[number], layer.ups[number]
        if down.shape[0] > 0:
            start = max(0, min(first, x.shape[0] - rows.min_rows))
            part = x[start : max(first + count, start + rows.min_rows)]
            own = _multiply_plain(_multiply_plain(part, down, None), up, None)[first - start : first - start + count]
            output[first : first + count].add_(own)
        first += count
    return output


def multiply(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Returns `x weight^T + bias`, `[M, O]`; compiled by TorchScript, too."""
    half = weight.half
    return _multiply_plain(x, weight.plain, bias) if half is None else torch.ops.quantized.linear_dynamic_fp16(x, half)


def _multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
    """Returns the maximum memory of the copies that may be made of one model's weights."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * MAX_PACKED_SHARE)
    if not can_pack(device, dtype):
        return MAX_COPIED_BYTES
    has_sysconf = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_sysconf else UNKNOWN_MEMORY
    return int(memory * MAX_PACKED_SHARE)


def pack(weight: Tensor) -> Tensor:
    """Returns a weight, `[O, I]`, packed where `can_pack`; else unchanged."""
    if not can_pack(weight.device, weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def can_halve(model: CausalModel) -> bool:
    """Returns True if decode steps may multiply with weights in float16, and this torch has the products."""
    is_plain = model.device.type == "cpu" and model.dtype == torch.float32
    if not (model.fast_paths.serving and is_plain and sum(map(torch.numel, model.module.parameters())) >= MIN_HALVED):
        return False
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack_weight(weight: Tensor, bias: Tensor | None, *, half: bool) -> Weight:
    """Returns a weight, `[O, I]`, as `multiply` reads it; in float16 only if it has no number beyond its range."""
    if half and weight.abs().max() <= MAX_HALF:
        return Weight(weight.new_empty(0), torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias))
    return Weight(pack(weight), None)


def get_linear(layer: Any) -> nn.Linear | None:
    """Returns the plain linear layer inside of a layer, which may have LoRA adapters; None: it is something else."""
    if type(layer) is nn.Linear:
        return layer
    base: Any = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or layer.merged or getattr(layer, "lora_variant", None):
        return None
    return base if all(_is_plain_lora(layer, name) for name in layer.lora_A) else None


def _is_plain_lora(layer: Any, name: str) -> bool:
    """Returns True if an adapter adds s B A x to its layer and nothing else; dropout does nothing while we sample."""
    parts = layer.lora_A[name], layer.lora_B[name]
    if any(type(part) is not nn.Linear or part.bias is not None for part in parts):
        return False
    return type(layer.lora_dropout[name]) in (nn.Identity, nn.Dropout)


def _list_linears(layers: Sequence[Any]) -> list[nn.Linear]:
    return [getattr(layer, "base_layer", layer) for layer in layers]


@torch.no_grad()
def collect_projection(layers: Sequence[Any], *, half: bool) -> Projection:
    """Returns layers with the same input, for each of which `get_linear` finds one, as one without adapters."""
    linears = _list_linears(layers)
    weights = [linear.weight.detach() for linear in linears]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    weight = pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights), bias, half=half)
    return Projection(weight, bias, [], [])


@torch.no_grad()
def collect_adapter(layers: Sequence[Any], name: str) -> tuple[Tensor, Tensor]:
    """Returns what an adapter adds to layers with the same input: an item of `downs` and one of `ups`.

    Example: layers of 2 and 3 outputs, the second with an adapter of rank 1, B = [1, 2, 3], scaling 2
        => up [[0], [0], [2], [4], [6]]
    """
    linears = _list_linears(layers)
    weight, size, row = linears[0].weight, sum(linear.out_features for linear in linears), 0
    downs, ups = [], []
    for layer, linear in zip(layers, linears, strict=True):
        if name in getattr(layer, "lora_A", ()):
            own = layer.lora_B[name].weight.detach() * layer.scaling[name]
            up = weight.new_zeros(size, own.shape[1])
            up[row : row + linear.out_features] = own
            downs.append(layer.lora_A[name].weight.detach().to(weight.dtype))
            ups.append(up)
        row += linear.out_features
    if not downs:
        return weight.new_zeros(0, linears[0].in_features), weight.new_zeros(size, 0)
    return pack(torch.cat(downs)), pack(torch.cat(ups, dim=1))


CHECKED_ROWS = 40  # up to here every number of rows is tried, beyond it every eighth


@torch.no_grad()
def find_stable_rows(model: CausalModel, max_rows: int) -> int:
    """Returns the smallest number of rows from which every product of the model gives a row the same bits.

    Args:
        max_rows: Rows of a full batch; returned if no smaller number works, so that every step has exactly this many.
    """
    before, stable = torch.get_num_threads(), min(MIN_ROWS, max_rows)
    torch.set_num_threads(1)  # on several threads a product is also divided by its number of rows
    try:
        for size, compute in _iterate_products(model):
            rows = torch.linspace(-1, 1, max_rows * size, device=model.device).view(max_rows, size).to(model.dtype)
            whole = compute(rows)
            each, eighth = range(stable, min(max_rows, CHECKED_ROWS)), range(max(stable, CHECKED_ROWS), max_rows, 8)
            counts = [*each, *eighth, max_rows]
            for count, following in pairwise(counts):
                if not torch.equal(compute(rows[:count]), whole[:count]):
                    stable = following
    finally:
        torch.set_num_threads(before)
    return stable


def _iterate_products(model: CausalModel) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Yields the input size and the product of one layer of each shape, packed and plain, as decode steps use it."""
    seen: set[tuple[int, ...]] = set()
    for layer in model.module.modules():
        if not isinstance(layer, nn.Linear | Conv1D) or tuple(layer.weight.shape) in seen:
            continue
        seen.add(tuple(layer.weight.shape))
        yield (layer.in_features if isinstance(layer, nn.Linear) else layer.nx), layer
        if type(layer) is nn.Linear:
            yield layer.in_features, partial(_multiply_plain, weight=pack(layer.weight.detach()), bias=None)
