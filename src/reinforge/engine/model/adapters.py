"""LoRA adapters in a model: their layers, and by what their output is multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from reinforge.engine.model.causal_model import CausalModel


@dataclass(frozen=True, slots=True)
class AdapterScales:
    """By what an adapter's output is multiplied, as PEFT keeps it."""

    lora_alpha: float  # that of its settings, which are saved with it
    layers: Mapping[str, tuple[float, float]]  # `lora_alpha` and factor of each layer, by its path


def read_scales(model: CausalModel, adapter: str) -> AdapterScales | None:
    """Returns the scales of an adapter; None: the model has none."""
    if not model.has_adapters:
        return None
    layers = {path: (each.lora_alpha[adapter], each.scaling[adapter]) for path, each in iterate_layers(model, adapter)}
    return AdapterScales(model.module.peft_config[adapter].lora_alpha, layers)


def write_scales(model: CausalModel, adapter: str, scales: AdapterScales | None) -> None:
    if scales is None:
        return
    model.module.peft_config[adapter].lora_alpha = scales.lora_alpha
    for path, layer in iterate_layers(model, adapter):
        layer.lora_alpha[adapter], layer.scaling[adapter] = scales.layers[path]


def iterate_layers(model: CausalModel, adapter: str) -> Iterator[tuple[str, Any]]:
    """Yields the path and PEFT's layer of each linear layer with this adapter."""
    from peft.tuners.lora import LoraLayer

    for path, layer in model.module.named_modules():
        if isinstance(layer, LoraLayer) and isinstance(layer, nn.Module) and adapter in layer.lora_A:
            yield path, layer
