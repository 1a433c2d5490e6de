"""The files of a model folder that decide what is read and what code runs, checked before anything is loaded.

A received folder is data: it may name weights only in itself and only as safetensors, no code of its own, no kernel to
download, and no adapter as the base of an adapter. Symbolic links are followed, since the Hugging Face cache is made of
them; they have to end at a regular file. Needs no torch and no transformers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from reinforge.bounded import load_json
from reinforge.errors import Problem
from reinforge.limits import get_limits

MAKING = threading.RLock()
"""Held while transformers makes a model.

Until it is done, torch's default type and methods of transformers' classes are replaced, for all threads. Two that make
models at the same time may leave the replacements behind: no later model of the process would have its weights tied.
"""


CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files that mark a folder as an adapter, in PEFT's layout."""
INDEX = "model.safetensors.index.json"
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT takes the first adapter out of the base model's weights."""
SMALL_FILES = (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG, INDEX)  # what `check_files` reads of a model
ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations that transformers contains. Any other is, or may fall back to, a kernel downloaded from the hub."""
CODE_KEYS = ("auto_map", "custom_generate", "custom_pipelines", "kernels", "kernel_config", "use_kernels")
MAX_LISTED = 3


def check_files(folder: Path, path: str, *, is_complete: bool = True) -> list[Problem]:
    """Returns what is unsafe or missing in a folder with a model, an adapter, or both.

    Args:
        is_complete: The weights have to be in it; False: they are not downloaded yet.
    """
    problems = []
    for name in (CONFIG, GENERATION_CONFIG):
        if (settings := read_json(folder / name)) is not None:
            problems += [Problem(path, f"{folder / name} {what}", fix) for what, fix in _find_unsafe_settings(settings)]
    if (folder / "custom_generate").exists():
        message = f"{folder} has custom code (custom_generate/), which reinforge never runs"
        problems.append(Problem(path, message, "remove that folder, if the model works without it"))
    if (folder / INDEX).exists():
        problems += _check_index(folder, path, is_complete=is_complete)
    if is_complete:
        odd = [file.name for file in sorted(folder.glob("*.safetensors")) if not file.is_file()]
        problems += [Problem(path, f"{folder / name} is not a regular file", "remove it") for name in odd]
    if (folder / ADAPTER_CONFIG).exists():
        problems += _check_adapter(folder, path, is_complete=is_complete)
    return problems


def check_tokenizer_settings(folder: Path, path: str) -> list[Problem]:
    """Returns the problem of a tokenizer that refers to code of its own."""
    settings = read_json(folder / TOKENIZER_CONFIG)
    if "auto_map" not in (settings or {}):
        return []
    message = f"{folder / TOKENIZER_CONFIG} refers to custom code (auto_map), which reinforge never runs"
    return [Problem(path, message, "use a tokenizer that transformers knows, and remove auto_map")]


def find_base(folder: Path) -> str | None:
    """Returns the base model that an adapter names, or None if the folder holds no adapter or a model of its own."""
    if not (folder / ADAPTER_CONFIG).is_file() or (folder / CONFIG).is_file():
        return None
    base = (read_json(folder / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
    return base if isinstance(base, str) else ""


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns a file's JSON object, or None if there is none: no regular file, too large, too deep, or damaged."""
    try:
        if not path.is_file() or path.stat().st_size > get_limits().file_bytes:
            return None
        content = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _find_unsafe_settings(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the settings of a model, at any depth, and the fix."""
    for key, value in _iterate_settings(settings):
        if key == "auto_map":
            yield (
                "refers to custom code (auto_map), which reinforge never runs",
                ("use a family that transformers knows, and remove auto_map"),
            )
        elif key in CODE_KEYS and value:
            yield f"names code to load ({key}), which reinforge never runs", f"remove {key}"
        elif key == "quantization_config" and value:
            yield (
                f"describes quantized weights (quantization_config){_name_method(value)}, which cannot be trained",
                "use the model's float weights (the same model without a suffix such as -GPTQ, -AWQ or -FP8), or a "
                "GGUF file of it, whose weights are converted to float32",
            )
        elif key == "transformers_weights" and value is not None:
            yield "names other weights (transformers_weights)", f"remove it, and call the weights {INDEX[:17]}"
        elif key.strip("_").removesuffix("_internal") in ("attn_implementation", "experts_implementation"):
            allowed = ", ".join(ATTENTION)
            named = list(value.values()) if isinstance(value, dict) else [value]
            if not all(each is None or each in ATTENTION for each in named):
                found = json.dumps(value)[:60]
                yield f"sets {key} to {found}, but only {allowed} run without a downloaded kernel", f"remove {key}"


def _name_method(settings: Any) -> str:
    """Returns how weights are quantized, such as ` by gptq`; nothing if the configuration does not say it."""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f" by {method[:20]}" if isinstance(method, str) else ""


def _iterate_settings(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields every key of an object and of the objects in it; not recursive, since the file may be deep."""
    left: list[Any] = [settings]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from value.items()
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _check_index(folder: Path, path: str, *, is_complete: bool) -> list[Problem]:
    index = read_json(folder / INDEX)
    names = index.get("weight_map") if index is not None else None
    if not isinstance(names, dict) or not names:
        message = f"{folder / INDEX} has no readable weight_map"
        return [Problem(path, message, "download the model again")]
    files = sorted({str(name) for name in names.values()})
    foreign = [name for name in files if not _is_plain_name(name)]
    if foreign:
        message = f"{folder / INDEX} names {_list_names(foreign)}, but weights are *.safetensors in the same folder"
        return [Problem(path, message, "get the model from a source that you trust")]
    missing = [name for name in files if is_complete and not (folder / name).is_file()]
    if missing:
        message = f"{folder / INDEX} names {_list_names(missing)}, which the folder does not have"
        return [Problem(path, message, "download the model again")]
    return []


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and PurePosixPath(name).name == name and not {"\\", ":", "\0"} & set(name)


def _check_adapter(folder: Path, path: str, *, is_complete: bool) -> list[Problem]:
    settings = read_json(folder / ADAPTER_CONFIG)
    if settings is None:
        return [Problem(path, f"{folder / ADAPTER_CONFIG} is not readable", "download the adapter again")]
    problems = []
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        message = f"{folder / ADAPTER_CONFIG} describes an adapter of the kind {json.dumps(kind)[:40]}"
        problems.append(Problem(path, message, "use a LoRA adapter (peft_type LORA)"))
    problems += [Problem(path, f"{folder / ADAPTER_CONFIG} {what}", fix) for what, fix in _find_lost_settings(settings)]
    # megatron_config makes PEFT import a module by name, corda_config and lora_ga_config make it unpickle a file
    named = [key for key, value in settings.items() if key.endswith("_config") and value]
    if named:
        message = f"{folder / ADAPTER_CONFIG} sets {', '.join(named)}, with which PEFT loads more than weights"
        problems.append(Problem(path, message, f"remove {', '.join(named)}"))
    if is_complete and not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        found = "only pickled weights (adapter_model.bin), which can run code" if pickled else "no weights"
        message = f"{folder} holds an adapter with {found}; {ADAPTER_WEIGHTS} is required"
        problems.append(
            Problem(path, message, "save the adapter with PEFT's save_pretrained, which writes safetensors")
        )
    return [*problems, *_check_base(folder, path)]


def _find_lost_settings(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what of a LoRA adapter would be lost in loading it, so that it were another one, and the fix."""
    if settings.get("use_dora"):
        yield (
            "sets use_dora (DoRA), whose magnitudes are not loaded",
            "merge it into its base with PEFT (merge_and_unload) and name the merged model, or train it without "
            "use_dora",
        )
    if settings.get("alora_invocation_tokens"):
        yield (
            "sets alora_invocation_tokens (aLoRA), after which alone the adapter would have to work",
            "use an adapter that was trained without alora_invocation_tokens",
        )
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter_")[0] in CHANGES_BASE:
        yield (
            f"sets init_lora_weights to {init}, with which loading it changes the weights of its base model",
            "convert it to plain LoRA with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _check_base(folder: Path, path: str) -> list[Problem]:
    base = find_base(folder)
    if base == "":
        message = f"{folder / ADAPTER_CONFIG} names no base model (base_model_name_or_path)"
        return [Problem(path, message, "set it to the folder or the hub id of the model that the adapter belongs to")]
    if base is not None and (Path(base) / ADAPTER_CONFIG).exists():
        itself = "itself" if Path(base).resolve() == folder.resolve() else f"{base}, which is an adapter, too,"
        message = f"{folder} holds adapters that name {itself} as their base model"
        return [Problem(path, message, "set base_model_name_or_path to a model without adapters")]
    return []


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(json.dumps(name[:80])[1:-1] for name in names[:MAX_LISTED]) + more
