"""Several adapters over one frozen model, sampled in one batch: each row goes through its own.

    rows of     prover  verifier  prover  -        x W once for all rows; then
    segments    prover: 0, 2      verifier: 1      y[0, 2] += s B_p A_p x[0, 2],  y[1] += s B_v A_v x[1]

The layers are PEFT's, and so is what they do elsewhere, where one adapter is active: in learning and scoring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import EngineError


class MixedAdapters:
    """Sends the rows of one model's batches through their own adapters.

    Args:
        model: A model with adapters.
        min_rows: In decoding each adapter multiplies so many rows at least, some of them in vain: with fewer, the last
            bit of a product depends on how many rows of the batch happen to be the adapter's.
    """

    def __init__(self, model: CausalModel, min_rows: int = 1):
        from peft.tuners.lora import LoraLayer

        self.device, self.min_rows = model.device, min_rows
        self._segments: list[tuple[str, Tensor]] | None = None
        for layer in model.module.modules():  # PEFT's layers are modules and `LoraLayer`s
            if isinstance(layer, nn.Module) and isinstance(layer, LoraLayer):
                layer.register_forward_pre_hook(self._without, with_kwargs=True)
                layer.register_forward_hook(self._with_own)

    @contextmanager
    def rows(self, names: Sequence[str]) -> Iterator[None]:
        """Gives row b of every batch the adapter `names[b]`; rows after them have none."""
        owned: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            owned.setdefault(name, []).append(row)
        self._segments = [(name, torch.tensor(rows, device=self.device)) for name, rows in owned.items()]
        try:
            yield
        finally:
            self._segments = None

    def _without(self, layer: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        if self._segments is None:
            return None
        return inputs, {**kwargs, "adapter_names": ["__base__"] * len(inputs[0])}

    def _with_own(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for name, rows in self._segments or ():
            if inputs[0].ndim != 3:
                raise EngineError("several adapters in one batch need layers that see rows apart, [B, T, H]")
            down, up = layer.lora_A[name], layer.lora_B[name]
            part = inputs[0].index_select(0, self._padded(rows, inputs[0].shape[1])).to(down.weight.dtype)
            own = (up(down(part))[: len(rows)] * layer.scaling[name]).to(output.dtype)
            output.index_add_(0, rows, own)

    def _padded(self, rows: Tensor, length: int) -> Tensor:
        missing = self.min_rows - len(rows)
        return torch.cat((rows, rows[:1].expand(missing))) if length == 1 and missing > 0 else rows
