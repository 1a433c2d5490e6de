"""The part of a checkpoint that is trained: the text model of a multimodal one, and of experts what is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

logger = logging.getLogger(__name__)

MAMBA_TYPES = {"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"}
"""Families whose `out_proj` PEFT refuses to adapt."""


def find_auto_class(config: Any) -> Any:
    # `in mapping.keys()` would import every family, for most of a second
    is_text = AutoModelForCausalLM._model_mapping.get(type(config), None) is not None
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def find_text_part(module: Any) -> nn.Module:
    """Returns the text model inside of a multimodal module; of any other module, the module."""
    return module if module.config.get_text_config() is module.config else module.get_decoder()


def find_layers_without_adapters(module: Any) -> list[str]:
    """Returns the paths of linear layers that get no adapters.

    Those outside of the text model, routers, which return more than a product, and what PEFT refuses.
    """
    text, head = find_text_part(module), module.get_output_embeddings()
    own = {id(part) for part in text.modules() if not type(part).__module__.startswith("transformers.models.")}
    own.add(id(head))
    linear = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    return [path for path, part in linear if id(part) not in own or _is_fused_by_mamba(module, path)]


def _is_fused_by_mamba(module: Any, path: str) -> bool:
    return module.config.model_type in MAMBA_TYPES and path.endswith(".out_proj")


def freeze_other_parts(module: Any) -> None:
    """Freezes what text does not go through: vision and audio towers, and their projections."""
    text = find_text_part(module)
    if text is module:
        return
    parts = (text, module.get_input_embeddings(), module.get_output_embeddings())
    own = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    frozen = 0
    for parameter in module.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)
            frozen += parameter.numel()
    if frozen:
        logger.info(
            "%s: the text model is trained; %.3g M other parameters stay", module.config.model_type, frozen / 1e6
        )


def find_expert_parameters(module: Any) -> list[str]:
    """Returns the experts' weight matrices, `[experts, in, out]`, by the end of their paths, which many layers share.

    Example: model.layers.1.mlp.experts.down_proj, model.layers.2.mlp.experts.down_proj -> mlp.experts.down_proj
    """
    return sorted({".".join(path.split(".")[-3:]) for path, _ in iterate_expert_parameters(module)})


def iterate_expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, parameter in module.named_parameters():
        if parameter.ndim == 3 and "experts" in path.split("."):
            yield path, parameter
