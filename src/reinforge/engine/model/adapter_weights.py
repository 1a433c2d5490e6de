"""Weights of single LoRA adapters by name, for sessions that make, read, load and exchange them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from reinforge.engine.model.adapters import iterate_layers
from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import EngineError, boundary


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The weights of an adapter, on the CPU."""

    tensors: Mapping[str, Tensor]  # by the path of the layer and `A` or `B`
    lora_alpha: float  # the adapter's output is multiplied by lora_alpha / R

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def make_adapter_weights(
    model: CausalModel, adapter: str, *, rank: int, seed: int, alpha: float = 32.0
) -> AdapterWeights:
    """Returns the first weights of an adapter: A uniform in +-1 / sqrt(inputs), B zero (arXiv:2106.09685).

    Its output is multiplied by alpha / rank, so that one learning rate suits every rank.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    most = model.module.peft_config[adapter].r
    if not 1 <= rank <= most:
        raise EngineError(f"the rank {rank} is not one of 1 to {most}, the rank of the adapters that were loaded")
    for path, layer in iterate_layers(model, adapter):
        down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        bound = 1 / math.sqrt(down.shape[1])
        first = torch.empty(rank, down.shape[1]).uniform_(-bound, bound, generator=generator)
        rows = torch.zeros(down.shape, dtype=down.dtype)
        rows[:rank] = first.to(down.dtype)
        tensors[f"{path}.A"], tensors[f"{path}.B"] = rows, torch.zeros(up.shape, dtype=up.dtype)
    return AdapterWeights(tensors, alpha * most / rank)


def read_adapter_weights(model: CausalModel, adapter: str) -> AdapterWeights:
    """Returns a copy of an adapter's weights."""
    tensors = {}
    for path, layer in iterate_layers(model, adapter):
        for part, name in ((layer.lora_A, "A"), (layer.lora_B, "B")):
            tensors[f"{path}.{name}"] = part[adapter].weight.detach().to("cpu", copy=True)
    return AdapterWeights(tensors, float(model.module.peft_config[adapter].lora_alpha))


def load_adapter_weights(model: CausalModel, adapter: str, folder: Path) -> AdapterWeights:
    """Returns the weights of an adapter in PEFT's layout."""
    with boundary(EngineError, f"cannot read the adapter of {folder}"):
        saved = load_file(folder / "adapter_model.safetensors")
        alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    saved = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    tensors = {}
    for path, _ in iterate_layers(model, adapter):
        for part in ("A", "B"):
            if (tensor := saved.pop(f"{path}.lora_{part}.weight", None)) is None:
                raise EngineError(f"{folder} has no weights for {path}: it is an adapter of another model")
            tensors[f"{path}.{part}"] = tensor
    return AdapterWeights(tensors, float(alpha))


@torch.no_grad()
def write_adapter_weights(model: CausalModel, adapter: str, weights: AdapterWeights) -> None:
    targets = {}
    for path, layer in iterate_layers(model, adapter):
        targets[f"{path}.A"], targets[f"{path}.B"] = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    if {name: t.shape for name, t in targets.items()} != {name: t.shape for name, t in weights.tensors.items()}:
        raise EngineError("these weights belong to an adapter of other layers, or of another rank")
    for name, parameter in targets.items():
        parameter.copy_(weights.tensors[name])
    scale_adapter(model, adapter, weights.lora_alpha)


def scale_adapter(model: CausalModel, adapter: str, lora_alpha: float) -> None:
    """Sets by what an adapter's output is multiplied, lora_alpha / R, in the model and in what is saved of it."""
    settings = model.module.peft_config[adapter]
    settings.lora_alpha = int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha
    for _, layer in iterate_layers(model, adapter):
        layer.lora_alpha[adapter] = settings.lora_alpha
        layer.scaling[adapter] = settings.lora_alpha / settings.r
