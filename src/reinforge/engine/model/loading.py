"""Loads models and tokenizers, adds adapters, and picks the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from reinforge.config.schema import LoRAConfig, PolicyConfig
from reinforge.engine.model.attention import use_grouped_attention
from reinforge.engine.model.causal_model import DEFAULT, CausalModel
from reinforge.engine.model.preflight import ADAPTERS, LORA
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, Problem, boundary
from reinforge.types.seeding import stable_seed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """Returns the device called `name`; `auto` takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: The device is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, available in there.items() if available)
    if not there.get(name, False):
        available = ", ".join(device for device, here in there.items() if here)
        raise ConfigError(Problem("finetuning.device", f"{name} is not on this machine", f"here: {available}, auto"))
    return torch.device(name)


@contextmanager
def _fetching(source: str | Path | None, what: str) -> Iterator[None]:
    """Turns whatever reading a model raises into `EngineError`; a hub that does not give it is the environment's."""
    with boundary(EngineError, what):
        try:
            yield
        except OSError as error:
            if Path(str(source)).is_dir():
                raise
            raise BackendUnavailable(f"{what}: {str(error).splitlines()[0]}") from error


def load_module(source: str | Path, dtype: torch.dtype) -> nn.Module:
    """Returns the module with its weights, from safetensors only and without remote code."""
    is_local = Path(source).is_dir() and not (Path(source) / ADAPTERS).is_file()  # adapters name their model
    with _fetching(source, f"load the model {source}"):
        return AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=is_local
        )


def add_adapters(module: Any, config: LoRAConfig, seed: int, name: str = DEFAULT) -> None:
    """Adds an adapter to a module's linear layers and freezes all else (LoRA, arXiv:2106.09685), by PEFT.

    Differs from the paper: every linear layer but the output layer, not the attention alone (arXiv:2305.14314 found
    that to match full weights); no dropout, which would make sampled log-probs inexact.

    Raises:
        ConfigError: No layer has one of the names of `target_modules`, or one is called like the adapter.
    """
    from peft import LoraConfig

    if hasattr(nn.ModuleDict, name) or any(name in path.split(".") for path, _ in module.named_modules()):
        fix = "give the adapter another name (llms.ENTRY.adapter)"
        raise ConfigError(Problem(LORA, f"a part of the model is called {name} too, which PEFT would mix up", fix))

    if Path(module.name_or_path).is_dir():  # the folder that `adapter_config.json` will name
        module.name_or_path = str(Path(module.name_or_path).absolute())
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=config.target_modules,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are meant
        torch.manual_seed(stable_seed(seed, "lora", *([] if name == DEFAULT else [name])))
        try:
            module.add_adapter(settings, name)
        except ValueError as error:
            raise ConfigError(Problem(f"{LORA}.target_modules", str(error))) from error


def draw_module(source: str | Path, dtype: torch.dtype, seed: int) -> nn.Module:
    """Returns a module of that configuration whose weights are drawn by the seed, the same on every device."""
    with _fetching(source, f"draw a model by the configuration of {source}"), torch.random.fork_rng(devices=[]):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        torch.manual_seed(stable_seed(seed, "weights"))
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def load_model(config: PolicyConfig, seed: int, device: str, adapters: Sequence[str] = (DEFAULT,)) -> CausalModel:
    """Returns the policy's model as its configuration asks, with adapters of these names where it trains adapters."""
    if config.model is None or config.model.startswith("bundled:"):
        message = f"{config.model!r} is no folder and no hub id"
        raise ConfigError(Problem("finetuning.policy.model", message, "give the folder of a Hugging Face model"))
    dtype, target = DTYPES[config.precision], pick_device(device)
    is_random = config.init == "random"
    module = draw_module(config.model, dtype, seed) if is_random else load_module(config.model, dtype)
    if getattr(module, "_hf_peft_config_loaded", False):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name)
    elif config.lora is not None:
        for name in adapters:
            add_adapters(module, config.lora, seed, name)
    use_grouped_attention(module)
    return CausalModel(module.to(target), config.max_context)


def load_tokenizer(config: PolicyConfig) -> Any:
    """Returns the tokenizer with the chat template that the configuration asks for.

    Raises:
        ConfigError: There is no chat template.
    """
    source = config.tokenizer or config.model
    with _fetching(source, f"load the tokenizer {source}"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if config.chat_template is not None:
        is_text = "{" in config.chat_template
        tokenizer.chat_template = config.chat_template if is_text else Path(config.chat_template).read_text()
    if tokenizer.chat_template is None:
        fix = "finetuning.policy.chat_template gives one, as Jinja text or a file"
        raise ConfigError(Problem("finetuning.policy.model", f"{source} has no chat template", fix))
    return tokenizer
