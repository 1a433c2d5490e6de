"""Activation checkpointing: a layer keeps only its input, and the backward pass computes the rest again.

Sublinear memory cost (arXiv:1604.06174), one segment per layer. transformers has it too, but only for modules in
training mode, which ours never are (dropout would make sampled log-probs inexact), and it takes the cache away from a
layer, through which siblings read their shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import ConfigError, Problem


def find_checkpointable_layers(model: CausalModel) -> list[nn.Module]:
    """Returns the layers that transformers marks as checkpointable.

    Raises:
        ConfigError: The family marks none.
    """
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        path = "finetuning.policy.activation_checkpointing"
        message = f"transformers does not support activation checkpointing for {model.config.model_type} models"
        raise ConfigError(Problem(path, message, "set it to false"))
    return layers


@contextmanager
def checkpoint_activations(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Makes forward passes inside the block keep only the inputs of these layers; run the backward pass inside, too.

    The layers are restored on exit, so a copy of the model made at any other time is an ordinary one.
    """
    for layer in layers:
        layer.forward = partial(_run_checkpointed, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _run_checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
