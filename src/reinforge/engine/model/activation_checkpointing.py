"""Activation checkpointing: a layer keeps its input and computes the rest again in the backward pass.

Sublinear memory cost (arXiv:1604.06174), a layer a segment. transformers has it too, but only for modules in training
mode, which ours never are (dropout would make sampled log-probs inexact), and it takes the cache away from a layer,
through which siblings get their common prefix.
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


def layers_of(model: CausalModel) -> list[nn.Module]:
    """Returns the layers that can be computed twice, which transformers marks.

    Raises:
        ConfigError: The family has none.
    """
    layers = [module for module in model.module.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        path = "finetuning.policy.activation_checkpointing"
        raise ConfigError(Problem(path, f"{model.config.model_type} models mark no layers for it", "set it to false"))
    return layers


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within, forward passes through these layers keep their inputs alone; the backward pass belongs within, too.

    The layers are as before afterwards: a copy of the model made at any other time is an ordinary one.
    """
    for layer in layers:
        layer.forward = partial(_kept_by_its_input, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _kept_by_its_input(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
