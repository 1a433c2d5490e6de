"""Several LoRA adapters in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import EngineError


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
