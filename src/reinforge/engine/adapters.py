"""Several adapters over one frozen model, sampled in one batch: each row goes through its own.

    rows of     prover  verifier  prover  -        x W once for all rows; then
    segments    prover: 0, 2      verifier: 1      y[0, 2] += s B_p A_p x[0, 2],  y[1] += s B_v A_v x[1]

The layers are PEFT's, and so is what they do elsewhere, where one adapter is active: in learning and scoring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reinforge.config.schema import PolicyConfig
from reinforge.engine.model import ADAPTERS, CausalModel
from reinforge.errors import ConfigError, EngineError, Problem


def check_adapters(config: PolicyConfig, names: Sequence[str], *, critic: bool) -> None:
    """Looks at the names that adapters are to have.

    Raises:
        ConfigError: Adapters of these names cannot be had.
    """
    if not names:
        return
    path = "finetuning.policy.lora"
    if config.lora is None:
        raise ConfigError(Problem(path, f"adapters {', '.join(names)} are asked for, but none are trained", "set lora"))
    if config.model is not None and (Path(config.model) / ADAPTERS).is_file():
        message = f"{config.model} holds an adapter already"
        raise ConfigError(Problem("finetuning.policy.model", message, "name its model, and load the adapter into one"))
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise ConfigError(Problem(path, f"adapters {', '.join(names)}: names must differ, and be letters, digits or _"))
    if critic and len(names) > 1:
        message = "a critic reads one policy's features, so it cannot serve several adapters"
        raise ConfigError(Problem("finetuning.algorithm", message, "use an algorithm without a critic, such as grpo"))


class MixedAdapters:
    """Sends the rows of one model's batches through their own adapters.

    Args:
        model: A model with adapters.
    """

    def __init__(self, model: CausalModel):
        from peft.tuners.lora import LoraLayer

        self.device = model.device
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
            part = inputs[0].index_select(0, rows).to(down.weight.dtype)
            output.index_add_(0, rows, (up(down(part)) * layer.scaling[name]).to(output.dtype))
