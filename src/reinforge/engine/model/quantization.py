"""A frozen base model in 4 bits under LoRA adapters (QLoRA, arXiv:2305.14314), by bitsandbytes.

Each linear layer but the output layer keeps its weights as NF4: 4 bits each, a scale for every 64 of them, and the
scales in 8 bits (double quantization, section 3). A product multiplies with the weights made again in the model's
dtype, so the sampler, the learner and the reference compute with the same numbers.

Differs from the paper: no paged optimizer, since the optimizer has the adapters alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reinforge.engine.model.preflight import QUANTIZATION
from reinforge.errors import ConfigError, Problem

DEVICES = ("cpu", "cuda")  # where bitsandbytes has kernels for NF4 that this project relies on


@torch.no_grad()
def quantize_linear_layers(module: Any, target: torch.device) -> None:
    """Replaces the linear layers of a model, except its output layer, by layers in 4 bits on a device."""
    if target.type not in DEVICES:
        message = f"{target.type} cannot multiply with weights in 4 bits"
        raise ConfigError(Problem(QUANTIZATION, message, f"remove it, or use one of: {', '.join(DEVICES)}"))
    from reinforge.engine.adapter_packages import import_bitsandbytes

    import_bitsandbytes()
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = module.get_output_embeddings()
    names = [name for name, part in module.named_modules() if type(part) is nn.Linear and part is not head]
    if not names:
        message = f"{module.config.model_type} models have no linear layers that can be kept in 4 bits"
        raise ConfigError(Problem(QUANTIZATION, message, "remove it"))
    for name in names:
        plain = module.get_submodule(name)
        layer = Linear4bit(
            plain.in_features,
            plain.out_features,
            bias=plain.bias is not None,
            compute_dtype=plain.weight.dtype,
            quant_type="nf4",
            device="meta",
        )
        # its kernel for AVX512-BF16 repacks the weights, and only passes without gradient use it: the sampler would
        # then compute other numbers than the learner
        layer.support_avx512bf16_for_cpu = False
        layer.weight = Params4bit(plain.weight.detach(), quant_type="nf4", module=layer)
        layer.bias = plain.bias
        module.set_submodule(name, layer.to(target).requires_grad_(False).eval())
    module.is_loaded_in_4bit = True  # PEFT asks for it
