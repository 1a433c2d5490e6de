"""The last layer's MLP, computed where somebody reads what comes out of it.

Attention mixes tokens, an MLP does not: behind the last attention, a token that nobody predicts anything from has done
its part. That is so for all of a prompt but its last token, and for whatever an agent was told between its replies.
Shapes: B rows, T tokens of a row, N places that are read, H features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


def last_layer(module: nn.Module) -> nn.Module | None:
    """Returns the last of the layers that transformers marks, if it has an MLP; None: the family marks none."""
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    return layers[-1] if layers and isinstance(getattr(layers[-1], "mlp", None), nn.Module) else None


@contextmanager
def only_at(places_N: Tensor, layer: Any) -> Iterator[None]:
    """Within, the layer's MLP computes these places of `[B, T, H]` alone, b T + t each, and gives 0 for all others.

    A layer that is computed again in the backward pass (`recompute.py`) computes all, since it will not be within then.
    """
    if "forward" in vars(layer):
        yield
        return
    shape = torch.Size()

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal shape
        shape = inputs[0].shape
        return inputs[0].flatten(0, 1).index_select(0, places_N)[None], *inputs[1:]

    def scatter(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nothing = output.new_zeros(shape).flatten(0, 1)
        return nothing.index_copy(0, places_N, output[0]).view(shape)

    hooks = [layer.mlp.register_forward_pre_hook(gather), layer.mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
