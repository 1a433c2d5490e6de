"""The model under its adapters as a plain folder, for a program that loads the adapters by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from reinforge.engine.checkpoint import hide_progress_bars
from reinforge.engine.model.causal_model import CausalModel
from reinforge.files import storage_boundary

LORA_PARTS = (".lora_", ".modules_to_save.")


def write_base_model(folder: Path, model: CausalModel, tokenizer: Any) -> None:
    """Writes the model without its adapters, and its tokenizer, to a new folder.

    Raises:
        StorageError: The files cannot be written; the message has their size.
    """
    weights = find_base_weights(model)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    with storage_boundary(folder, num_bytes), hide_progress_bars():
        folder.mkdir(parents=True)
        if model.has_adapters:
            model.module._hf_peft_config_loaded = False  # else only the adapters are saved
            try:
                model.module.save_pretrained(folder, state_dict=weights)
            finally:
                model.module._hf_peft_config_loaded = True
        else:
            model.module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def find_base_weights(model: CausalModel) -> dict[str, Tensor]:
    """Returns the model's own weights by the names that they have without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.module.state_dict().items()
        if not any(part in name for part in LORA_PARTS)
    }
