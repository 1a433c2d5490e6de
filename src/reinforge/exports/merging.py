"""A checkpoint as one plain model: LoRA adapters are added to the weights that they belong to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.engine.adapter_packages import import_peft
from reinforge.engine.checkpoint import hide_progress_bars
from reinforge.engine.model.hub import check_model_source
from reinforge.engine.model.loading import load_module
from reinforge.engine.model.model_files import ADAPTER_CONFIG
from reinforge.engine.model.source import find_base_source, open_source
from reinforge.errors import EngineError, boundary
from reinforge.files import storage_boundary

WHERE = "RUN"  # what names the model on the command line, for messages
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_merged(folder: Path) -> nn.Module:
    """Returns a checkpoint's model in float32, with W + s B A in place of each adapted W (arXiv:2106.09685)."""
    held = find_base_source(folder, WHERE)
    with hide_progress_bars():
        if held is None:
            return load_module(folder, torch.float32)
        check_model_source(folder, WHERE)
        base = open_source(held, WHERE)
        module = load_module(base.location, torch.float32, base.revision)
    import_peft()
    from peft import PeftModel

    with (
        boundary(EngineError, f"cannot merge the adapters of {folder} into {base}"),
        hide_progress_bars(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT asks transformers by the old name
        adapted = PeftModel.from_pretrained(module, str(folder), local_files_only=True)
        _refuse_shared_weights(adapted, folder)
        merged: nn.Module = adapted.merge_and_unload(safe_merge=True)
    return merged


def _refuse_shared_weights(module: nn.Module, folder: Path) -> None:
    """Refuses adapters of weights that two layers share: the sum of both would change the other layer, too."""
    from peft.tuners.lora import LoraLayer

    adapted = {
        id(parameter): path
        for path, layer in module.named_modules()
        if isinstance(layer, LoraLayer)
        for parameter in layer.get_base_layer().parameters(recurse=False)
    }
    paths: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(name)
    for key, path in adapted.items():
        if len(paths[key]) > 1:
            raise EngineError(
                f"{folder} adapts {path}, whose weights another layer shares ({' and '.join(paths[key])}), so they "
                "cannot be merged; export the adapter itself (--format peft), or train without an adapter of that layer"
            )


def set_sampling(module: Any, sampling: SamplingConfig) -> None:
    """Makes `generate` and vLLM sample as the run did by default, without the base's own filters and penalties."""
    config = module.generation_config
    config.do_sample = sampling.temperature > 0
    for name in ("temperature", "top_p", "top_k", "min_p"):
        setattr(config, name, getattr(sampling, name) if config.do_sample else None)
    config.min_p = config.min_p or None
    config.repetition_penalty = config.typical_p = None


def save_model(module: Any, tokenizer: Any, folder: Path, dtype: str) -> None:
    module.to(DTYPES[dtype])
    num_bytes = sum(each.numel() * each.element_size() for each in module.parameters())
    with storage_boundary(folder, num_bytes), hide_progress_bars():
        folder.mkdir(parents=True, exist_ok=True)
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def name_base(folder: Path, base: str, revision: str | None) -> None:
    file = folder / ADAPTER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings |= {"base_model_name_or_path": base, "revision": revision, "inference_mode": True}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
