"""Loads models and tokenizers, adds adapters, and picks the device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.fast_paths import FastPaths
from reinforge.engine.model.attention import use_grouped_attention
from reinforge.engine.model.causal_model import DEFAULT_ADAPTER, CausalModel
from reinforge.engine.model.fused_layers import use_fused_layers
from reinforge.engine.model.hub import check_model_source, check_tokenizer_source, check_trainable, find_adapter_base
from reinforge.engine.model.model_files import MAKING
from reinforge.engine.model.preflight import CHAT_TEMPLATE, LORA
from reinforge.engine.model.source import MODEL, TOKENIZER, check_same_tokens, find_source, open_source, open_tokenizer
from reinforge.engine.model.text_part import (
    find_auto_class,
    find_expert_parameters,
    find_layers_without_adapters,
    freeze_other_parts,
)
from reinforge.engine.prompts.template_sandbox import find_template_problem
from reinforge.errors import BackendUnavailable, ConfigError, EngineError, Problem, boundary, did_you_mean
from reinforge.types.seeding import stable_seed

logger = logging.getLogger(__name__)

TRAIN_EXPERTS = "to train the experts, too, set finetuning.policy.lora.target_parameters: all-experts"
WIDE = 192  # features of models whose products may have a library of their own
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """Returns the device called `name`; `auto` prefers CUDA, then MPS, then the CPU.

    Another accelerator that torch knows (such as `xpu`) is used only if it is named.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_available in available.items() if is_available)
    if name not in available and (accelerator := torch.accelerator.current_accelerator()) is not None:
        available[accelerator.type] = True
    if not available.get(name, False):
        names = ", ".join(device for device, is_available in available.items() if is_available)
        raise ConfigError(Problem("finetuning.device", f"this machine has no {name}", f"use one of: {names}, auto"))
    return torch.device(name)


@contextmanager
def _translate_load_errors(source: str | Path | None, what: str) -> Iterator[None]:
    """Raises `BackendUnavailable` for what a model hub fails to deliver, and `EngineError` for every other error."""
    with boundary(EngineError, what):
        try:
            yield
        except OSError as error:
            if Path(str(source)).is_dir():
                raise
            raise BackendUnavailable(f"{what}: {str(error).splitlines()[0]}") from error


def load_module(
    source: str | Path, dtype: torch.dtype, revision: str | None = None, *, as_found: bool = False
) -> nn.Module:
    """Returns the module with its weights, from safetensors or GGUF only and without remote code.

    Weights of a safetensors file in this data type stay in the file, whose pages all processes of a machine share.

    Args:
        source: Folder, hub id, GGUF file or `pip:NAME`; of an adapter, the base model is loaded, too.
        as_found: Leave the weights in the data type of their file, if they are not those of an adapter.

    Raises:
        ConfigError: The model refers to code, or to weights outside of its folder, or lacks weights.
        BackendUnavailable: A hub id is neither in the cache nor to be had from the hub.
        EngineError: The model cannot be loaded.
    """
    with _translate_load_errors(source, f"cannot load the model {source}"):
        own = open_source(find_source(str(source), MODEL, revision), MODEL)
        is_local = check_model_source(own.location, MODEL, revision=own.revision)
        base = find_adapter_base(own.location, MODEL, own.revision)
        model = own if base is None else open_source(base, MODEL)
        check_trainable(model, MODEL)
        config = AutoConfig.from_pretrained(
            model.location, trust_remote_code=False, local_files_only=is_local, **_revision_argument(model.revision)
        )
        with MAKING:
            module, loaded = find_auto_class(config).from_pretrained(
                model.location,
                dtype="auto" if as_found and base is None else dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=is_local,
                adapter_kwargs={"local_files_only": is_local},  # else it looks for adapters at the hub
                output_loading_info=True,
                **_revision_argument(model.revision),
            )
        _refuse_missing_weights(model.name, loaded["missing_keys"])
        if base is not None:
            from reinforge.engine.adapter_packages import import_peft

            import_peft()
            settings = {"local_files_only": is_local, **_revision_argument(own.revision)}
            with MAKING:
                found = module.load_adapter(own.location, adapter_kwargs=settings)
            _refuse_lost_weights(own.name, found)
        return module


def _revision_argument(revision: str | None) -> dict[str, str]:
    return {} if revision is None else {"revision": revision}


def _refuse_missing_weights(source: str, names: Iterable[str]) -> None:
    """Refuses a model some of whose weights would be random, such as a classifier's, which has no output layer."""
    if missing := sorted(names):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        message = f"{source} has no weights for {missing[0]}{more}, so it is not a complete language model"
        fix = "use a checkpoint of the language model, whose config.json names an architecture ...ForCausalLM"
        raise ConfigError(Problem(MODEL, message, fix))


def _refuse_lost_weights(source: str, loaded: Any) -> None:
    """Refuses an adapter with weights that no layer takes, or with layers that it has no weights for."""
    lost = sorted(loaded.unexpected_keys)
    missing = sorted(name for name in loaded.missing_keys if "lora_" in name)  # else tied to one that is loaded
    if lost or missing:
        what = f"its {lost[0]} belongs to no layer" if lost else f"it has no weights for {missing[0]}"
        fix = f"check that {source} is whole, and that its base_model_name_or_path is the model that it was trained on"
        raise ConfigError(Problem(MODEL, f"{source} does not fit its base model: {what}", fix))


def add_adapter(
    module: Any, config: LoRAConfig, seed: int, name: str = DEFAULT_ADAPTER, revision: str | None = None
) -> None:
    """Adds a LoRA adapter (arXiv:2106.09685) to a module's linear layers by PEFT, and freezes all other weights.

    Differs from the paper: every linear layer but the output layer gets one, not the attention alone (arXiv:2305.14314
    found that this matches full fine-tuning); no dropout, which would make sampled log-probs inexact.

    Args:
        revision: Commit, tag or branch of the model at the hub, by which a saved adapter finds it again.

    Raises:
        ConfigError: No layer matches `target_modules`, a module of `modules_to_save` cannot be trained in full, or a
            part of the model has the adapter's name.
    """
    from reinforge.engine.adapter_packages import import_peft  # for adapters alone

    import_peft()
    from peft import LoraConfig

    if hasattr(nn.ModuleDict, name) or any(name in path.split(".") for path, _ in module.named_modules()):
        fix = "give the adapter another name (llms.ENTRY.adapter)"
        raise ConfigError(
            Problem(LORA, f"a module of the model is also called {name}, and PEFT would confuse the two", fix)
        )

    if Path(module.name_or_path).is_dir():  # `adapter_config.json` will name this folder
        module.name_or_path = str(Path(module.name_or_path).absolute())
    check_modules_to_save(module, config.modules_to_save or [])
    experts = find_expert_parameters(module) or None
    if experts and not config.target_parameters:
        logger.info("LoRA: the experts (%s) and their routers stay frozen; %s", ", ".join(experts), TRAIN_EXPERTS)
    settings = LoraConfig(
        revision=revision,
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        target_modules=config.target_modules,
        exclude_modules=find_layers_without_adapters(module) or None,
        target_parameters=experts if config.target_parameters == "all-experts" else config.target_parameters,
        modules_to_save=config.modules_to_save or None,
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are intended
        torch.manual_seed(stable_seed(seed, "lora", *([] if name == DEFAULT_ADAPTER else [name])))
        try:
            module.add_adapter(settings, name)
        except (TypeError, ValueError) as error:
            setting = "modules_to_save" if "modules_to_save" in str(error) else "target_modules"
            raise ConfigError(Problem(f"{LORA}.{setting}", str(error))) from error


def check_modules_to_save(module: Any, names: Sequence[str]) -> None:
    """Checks that each name matches only modules of that name, whose weights are not tied to other modules.

    PEFT takes every module whose path ends with the name's text, so `norm` would match `input_layernorm`, too.
    """
    where = f"{LORA}.modules_to_save"
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    for name in names:
        own = [path for path in paths if f".{path}".endswith(f".{name}")]
        if not own:
            last_names = sorted({path.rpartition(".")[2] for path in paths if not path.rpartition(".")[2].isdecimal()})
            message = f'the model has no module "{name}"{did_you_mean(name, last_names)}'
            raise ConfigError(Problem(where, message, f"use one of: {', '.join(last_names)}"))
        if others := [path for path in paths if path.endswith(name) and path not in own]:
            message = f'"{name}" also matches {others[0]}, whose path ends with it'
            raise ConfigError(Problem(where, message, f"write more of the path, such as {own[0]}"))
        inside: dict[int, str] = {}
        outside: dict[int, str] = {}
        for path, parameter in module.named_parameters(remove_duplicate=False):
            is_inside = any(path.startswith(f"{owner}.") for owner in own)
            (inside if is_inside else outside)[id(parameter)] = path
        if tied := inside.keys() & outside.keys():
            first = min(tied, key=inside.__getitem__)
            message = f"{inside[first]} and {outside[first]} are tied (one tensor), so {name} cannot be trained alone"
            raise ConfigError(Problem(where, message, f"remove {name}, or use a model without tied embeddings"))


def init_random_module(source: str | Path, dtype: torch.dtype, seed: int, revision: str | None = None) -> nn.Module:
    """Returns a module with the configuration of `source` and random weights from the seed, equal on every device."""
    what = f"cannot initialize a model from the configuration of {source}"
    with _translate_load_errors(source, what), MAKING, torch.random.fork_rng(devices=[]):
        own = open_source(find_source(str(source), MODEL, revision), MODEL)
        is_local = check_model_source(own.location, MODEL, weights=False, revision=own.revision)
        config = AutoConfig.from_pretrained(
            own.location, trust_remote_code=False, local_files_only=is_local, **_revision_argument(own.revision)
        )
        torch.manual_seed(stable_seed(seed, "weights"))
        return find_auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)


def load_model(
    config: PolicyConfig,
    seed: int,
    device: str,
    adapters: Sequence[str] = (DEFAULT_ADAPTER,),
    *,
    deterministic: bool = False,
    stays_in_files: bool = False,
) -> CausalModel:
    """Returns the configured model; where it trains adapters, with one for each of these names.

    Args:
        stays_in_files: Leave the weights on the host, and in the files that they come from if these have their data
            type, or if no adapter is trained, in any data type: `ShardedModel` divides and moves them.
    """
    if config.model is None or config.model.startswith("bundled:"):
        message = f"{config.model!r} is neither a folder nor a hub id"
        raise ConfigError(Problem(MODEL, message, "give the folder of a Hugging Face model"))
    dtype, target, fast_paths = DTYPES[config.dtype], pick_device(device), FastPaths.switch(config.fast_paths)
    is_random = config.init == "random"
    if is_random:
        module = init_random_module(config.model, dtype, seed, config.revision)
    else:
        as_found = stays_in_files and config.lora is None
        module = load_module(config.model, dtype, config.revision, as_found=as_found)
    freeze_other_parts(module)
    if getattr(module, "_hf_peft_config_loaded", False):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name or ".modules_to_save." in name)
    elif config.lora is not None:
        if config.quantization is not None:
            from reinforge.engine.model.quantization import quantize_linear_layers

            quantize_linear_layers(module, target)
        for name in adapters:
            add_adapter(module, config.lora, seed, name, config.revision)
    if fast_paths.attention:
        use_grouped_attention(module)
    if fast_paths.fused_layers:
        use_fused_layers(module, has_adapters=getattr(module, "_hf_peft_config_loaded", False))
    text: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
    is_wide = getattr(text, "hidden_size", 0) >= WIDE
    if fast_paths.products and is_wide and target.type == "cpu" and not deterministic:
        from reinforge.engine.model.products import use_faster_products

        use_faster_products(module)
    return CausalModel(module if stays_in_files else module.to(target), config.max_model_len, fast_paths)


def load_tokenizer(config: PolicyConfig) -> Any:
    """Returns the tokenizer with the configured chat template."""
    source, setting = config.tokenizer or config.model, TOKENIZER if config.tokenizer else MODEL
    with _translate_load_errors(source, f"cannot load the tokenizer {source}"):
        own = open_tokenizer(config)
        is_local = check_tokenizer_source(own.location, setting, own.revision)
        tokenizer = AutoTokenizer.from_pretrained(
            own.location, trust_remote_code=False, local_files_only=is_local, **_revision_argument(own.revision)
        )
        check_same_tokens(tokenizer, config)
    if config.chat_template is not None:
        is_text = "{" in config.chat_template
        tokenizer.chat_template = config.chat_template if is_text else Path(config.chat_template).read_text()
    if tokenizer.chat_template is None:
        fix = "set finetuning.policy.chat_template to Jinja text or to a file"
        raise ConfigError(Problem(MODEL, f"{source} has no chat template", fix))
    owner = TOKENIZER if config.tokenizer else MODEL
    _check_chat_template(tokenizer, owner if config.chat_template is None else CHAT_TEMPLATE)
    return tokenizer


def _check_chat_template(tokenizer: Any, path: str) -> None:
    held = tokenizer.chat_template
    for text in held.values() if isinstance(held, dict) else [held]:
        if (problem := find_template_problem(text, tokenizer.special_tokens_map)) is not None:
            message = f"the chat template of {tokenizer.name_or_path} {problem}"
            raise ConfigError(Problem(path, message, f"set {CHAT_TEMPLATE} to another template"))
