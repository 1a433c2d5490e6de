"""Saved LoRA adapters that a running model samples from, beside those that it trains."""

from __future__ import annotations

import warnings
from pathlib import Path

from safetensors import safe_open

from reinforge.engine import checkpoint
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.model_files import ADAPTER_CONFIG, CHANGES_BASE, read_json
from reinforge.errors import EngineError, boundary

_SPECIAL = (
    "modules_to_save", "use_dora", "target_parameters", "alora_invocation_tokens", "layer_replication"
)  # fmt: skip
"""Settings without which an adapter adds s B A x to linear layers and does nothing else."""


def find_special_setting(folder: Path) -> str | None:
    """Returns what keeps a saved adapter from being sampled in one batch with others; None: nothing does.

    Example: "modules_to_save is ['lm_head']".
    """
    settings = read_json(folder / ADAPTER_CONFIG) or {}
    if settings.get("peft_type", "LORA") != "LORA":
        return f"peft_type is {settings.get('peft_type')}"
    if settings.get("bias", "none") != "none":
        return f"bias is {settings['bias']}"
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter_")[0] in CHANGES_BASE:
        return f"init_lora_weights is {init}"
    return next((f"{name} is {settings[name]}" for name in _SPECIAL if settings.get(name)), None)


def find_outer_layer(model: CausalModel, folder: Path) -> str | None:
    """Returns the input or output embeddings that a saved adapter changes, by their path; None: it changes neither.

    All rows share them, and the model keeps the layers that it was loaded with.
    """
    outer = {id(model.head), id(model.module.get_output_embeddings()), id(model.module.get_input_embeddings())}
    paths = [path for path, part in model.module.named_modules(remove_duplicate=False) if id(part) in outer]
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = [name.removeprefix("base_model.model.") for name in file.keys()]  # noqa: SIM118  it is not a mapping
    return next((path for path in paths if any(name.startswith(f"{path}.") for name in names)), None)


def _find_obstacle(model: CausalModel) -> str | None:
    """Returns what keeps the adapters that a model has from sharing a batch; None: nothing does."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, settings in model.module.peft_config.items():
        if settings.bias != "none":
            return f"biases belong to {name} (bias is {settings.bias})"
    outer = (model.head, model.module.get_input_embeddings())
    for path, layer in model.module.named_modules():
        if isinstance(layer, AuxiliaryTrainingWrapper):
            return f"{path} is trained in full, or for some tokens,"
        if isinstance(layer, LoraLayer) and layer in outer:
            return f"{path} has an adapter"
        if isinstance(layer, LoraLayer) and (layer.lora_variant or any(layer.lora_bias.values())):
            return f"{path} has an adapter that is not plain LoRA"
    return None


def add_saved_adapter(model: CausalModel, name: str, folder: Path) -> None:
    """Adds a saved adapter to a model that has adapters already; the active one stays active."""
    if not model.has_adapters:
        raise EngineError("adapters are added to a model that was loaded with adapters; set policy.lora")
    from peft import LoraConfig

    if (special := find_special_setting(folder)) is not None:
        raise EngineError(f"{folder}: {special}, so the adapter cannot share a batch with others")
    if (own := _find_obstacle(model)) is not None:
        raise EngineError(f"{folder}: {own} in the model that it would join, so the two cannot share a batch")
    active = model.adapter
    with boundary(EngineError, f"cannot load the adapter {folder}"), warnings.catch_warnings():
        if (outer := find_outer_layer(model, folder)) is not None:
            raise EngineError(f"{folder}: it changes {outer}, so the adapter cannot share a batch with others")
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
        settings = LoraConfig.from_pretrained(str(folder))
        settings.inference_mode = True
        model.module.add_adapter(settings, name)
    try:
        if (special := _find_obstacle(model)) is not None:
            raise EngineError(f"{folder}: {special}, so the adapter cannot share a batch with others")
        checkpoint.load_weights(folder, model)
        for parameter in model.trained_parameters.values():
            parameter.requires_grad_(False)
    except BaseException:
        model.use_adapter(active)
        model.module.delete_adapter(name)
        raise
    model.use_adapter(active)


def remove_adapter(model: CausalModel, name: str) -> None:
    """Removes an adapter that is not the active one."""
    model.module.delete_adapter(name)
