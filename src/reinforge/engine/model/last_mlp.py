"""The last layer's MLP, computed only for the tokens whose features are needed.

Attention mixes tokens, an MLP does not. After the last attention, a token that predicts nothing of interest is done:
all of a prompt but its last token, and the messages that an agent receives between its replies.

Shapes: B rows, T tokens of a row, N needed tokens, H features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


def find_last_layer(module: nn.Module) -> nn.Module | None:
    """Returns the last layer that transformers marks as one, if it has an MLP; None: the family marks none."""
    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    return layers[-1] if layers and isinstance(getattr(layers[-1], "mlp", None), nn.Module) else None


@contextmanager
def compute_mlp_at(indices_N: Tensor, layer: Any) -> Iterator[None]:
    """Makes the layer's MLP compute only these tokens of `[B, T, H]`, b T + t each, and return 0 for all others.

    A checkpointed layer (`activation_checkpointing.py`) computes all tokens: its backward pass, which runs it again,
    comes after this block.
    """
    if "forward" in vars(layer):
        yield
        return
    shape = torch.Size()

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal shape
        shape = inputs[0].shape
        return inputs[0].flatten(0, 1).index_select(0, indices_N)[None], *inputs[1:]

    def scatter(_: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # experts may return the router's choices, too
            return scatter(_, inputs, output[0]), *output[1:]
        zeros = output.new_zeros(shape).flatten(0, 1)
        return zeros.index_copy(0, indices_N, output[0]).view(shape)

    hooks = [layer.mlp.register_forward_pre_hook(gather), layer.mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
