"""LoRA adapters: their weights by name, and those of several adapters in one batch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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
    for path, layer in _iterate_layers(model, adapter):
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
    for path, layer in _iterate_layers(model, adapter):
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
    for path, _ in _iterate_layers(model, adapter):
        for part in ("A", "B"):
            if (tensor := saved.pop(f"{path}.lora_{part}.weight", None)) is None:
                raise EngineError(f"{folder} has no weights for {path}: it is an adapter of another model")
            tensors[f"{path}.{part}"] = tensor
    return AdapterWeights(tensors, float(alpha))


@torch.no_grad()
def write_adapter_weights(model: CausalModel, adapter: str, weights: AdapterWeights) -> None:
    targets = {}
    for path, layer in _iterate_layers(model, adapter):
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
    for _, layer in _iterate_layers(model, adapter):
        layer.lora_alpha[adapter] = settings.lora_alpha
        layer.scaling[adapter] = settings.lora_alpha / settings.r


@dataclass(frozen=True, slots=True)
class AdapterScales:
    """By what an adapter's output is multiplied, as PEFT keeps it."""

    lora_alpha: float  # that of its settings, which are saved with it
    layers: Mapping[str, tuple[float, float]]  # `lora_alpha` and factor of each layer, by its path


def read_scales(model: CausalModel, adapter: str) -> AdapterScales | None:
    """Returns the scales of an adapter; None: the model has none."""
    if not model.has_adapters:
        return None
    layers = {path: (each.lora_alpha[adapter], each.scaling[adapter]) for path, each in _iterate_layers(model, adapter)}
    return AdapterScales(model.module.peft_config[adapter].lora_alpha, layers)


def write_scales(model: CausalModel, adapter: str, scales: AdapterScales | None) -> None:
    if scales is None:
        return
    model.module.peft_config[adapter].lora_alpha = scales.lora_alpha
    for path, layer in _iterate_layers(model, adapter):
        layer.lora_alpha[adapter], layer.scaling[adapter] = scales.layers[path]


def _iterate_layers(model: CausalModel, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yields the path and PEFT's layer of each linear layer with this adapter."""
    from peft.tuners.lora import LoraLayer

    for path, layer in model.module.named_modules():
        if isinstance(layer, LoraLayer) and isinstance(layer, nn.Module) and adapter in layer.lora_A:
            yield path, layer


class LoRABatch:
    """Sends each row of a model's batches through the row's own adapter.

    Args:
        min_rows: In decode steps each adapter multiplies at least this many rows; repeated rows fill the gap. With
            fewer rows, the last bit of a product depends on how many rows of the batch use the adapter.
    """

    def __init__(self, model: CausalModel, min_rows: int = 1):
        self.model, self.device, self.min_rows = model, model.device, min_rows
        self._segments: list[tuple[str, Tensor]] | None = None
        self._hooked: set[int] = set()
        self._hooks = list[RemovableHandle]()
        self.hook_layers()

    def hook_layers(self) -> None:
        """Takes over the layers that have got adapters since the last time."""
        from peft.tuners.lora import LoraLayer

        for path, layer in self.model.module.named_modules():  # PEFT's layers are modules and `LoraLayer`s
            if isinstance(layer, LoraLayer) and layer.lora_embedding_A:
                fix = "remove it from finetuning.policy.lora.target_modules"
                raise EngineError(f"cannot sample several adapters in one batch: {path} has one; {fix}")
            if isinstance(layer, nn.Module) and isinstance(layer, LoraLayer) and id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                self._hooks.append(layer.register_forward_pre_hook(self._skip_adapters, with_kwargs=True))
                self._hooks.append(layer.register_forward_hook(self._add_own_adapters))

    def close(self) -> None:
        """Gives the layers back, which would otherwise keep this object, and it the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def route_rows(self, names: Sequence[str]) -> Iterator[None]:
        """Gives row b of every batch inside the block the adapter `names[b]`; further rows have none."""
        rows_by_name: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows_by_name.setdefault(name, []).append(row)
        self._segments = [(name, torch.tensor(rows, device=self.device)) for name, rows in rows_by_name.items()]
        try:
            yield
        finally:
            self._segments = None

    def _skip_adapters(self, layer: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if self._segments is None:
            return None
        return inputs, {**kwargs, "adapter_names": ["__base__"] * len(inputs[0])}

    def _add_own_adapters(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for name, rows in self._segments or ():
            if name not in layer.lora_A:
                continue
            if inputs[0].ndim != 3:
                raise EngineError(
                    f"cannot sample several adapters in one batch: a layer got {list(inputs[0].shape)}, not [B, T, H]"
                )
            down, up = layer.lora_A[name], layer.lora_B[name]
            part = inputs[0].index_select(0, self._pad_rows(rows, inputs[0].shape[1])).to(down.weight.dtype)
            own = (up(down(part))[: len(rows)] * layer.scaling[name]).to(output.dtype)
            output.index_add_(0, rows, own)

    def _pad_rows(self, rows: Tensor, length: int) -> Tensor:
        missing = self.min_rows - len(rows)
        return torch.cat((rows, rows[:1].expand(missing))) if length == 1 and missing > 0 else rows
