"""What is wrong with a policy's model, found by looking at its files: no torch, no network, a few milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.config.schema import PolicyConfig
from reinforge.errors import Problem

MODEL, TOKENIZER, LORA = "finetuning.policy.model", "finetuning.policy.tokenizer", "finetuning.policy.lora"
CHAT_TEMPLATE = "finetuning.policy.chat_template"
ADAPTERS = "adapter_config.json"
"""Marks a folder that holds an adapter, in PEFT's layout."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_policy(config: PolicyConfig) -> list[Problem]:
    """Returns every problem of the model that a policy names; a hub id is left to transformers."""
    if config.model is None:
        return [Problem(MODEL, "no model is named", "give the folder of a Hugging Face model, or a hub id")]
    if config.model.startswith("bundled:"):
        return _check_template_file(config)
    folder = Path(config.model)
    problems = _check_folder(config.model, MODEL) or (_check_model(config, folder) if folder.is_dir() else [])
    if config.lora is not None and config.init == "random":
        message = "adapters of weights that are drawn anew belong to no model that anybody could load"
        problems.append(Problem(LORA, message, "leave out either lora or init: random"))
    if config.tokenizer is not None:
        problems += _check_folder(config.tokenizer, TOKENIZER)
    if not problems or folder.is_dir():
        problems += _check_tokenizer(config)
    return problems + _check_template_file(config)


def check_adapters(config: PolicyConfig, names: Sequence[str], *, critic: bool) -> list[Problem]:
    """Returns why adapters of these names cannot be had.

    Args:
        config: The policy.
        names: The names; none: one policy.
        critic: A critic is trained beside them.
    """
    if not names:
        return []
    told, holds = ", ".join(names), config.model is not None and (Path(config.model) / ADAPTERS).is_file()
    problems = []
    if config.lora is None and not (holds and len(names) == 1):
        problems.append(Problem(LORA, f"adapters {told} are asked for, but none are trained", "set lora, such as {}"))
    if holds and len(names) > 1:
        message = f"{config.model} holds an adapter already, and {told} are to begin each as its own"
        problems.append(Problem(MODEL, message, "name its model, and load the adapter into one"))
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        problems.append(Problem(LORA, f"adapters {told}: names must differ, and be letters, digits or _"))
    if critic and len(names) > 1:
        message = f"a critic reads one policy's features, so it cannot serve several adapters ({told})"
        problems.append(Problem("finetuning.algorithm", message, "use an algorithm without a critic, such as grpo"))
    return problems


def looks_like_hub_id(name: str) -> bool:
    """Returns True for `owner/name`.

    Example: `Qwen/Qwen2.5-0.5B` -> True; `./models/mine` and `/models/mine` -> False.
    """
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def _check_folder(name: str, path: str) -> list[Problem]:
    if Path(name).is_dir():
        return []
    if Path(name).exists():
        return [Problem(path, f"{name} is a file, not a folder", "give the folder that holds config.json")]
    if looks_like_hub_id(name):
        return []
    fix = "give a folder that exists, or a hub id such as owner/name"
    return [Problem(path, f"there is no folder {name} (looked in {Path.cwd()})", fix)]


def _check_model(config: PolicyConfig, folder: Path) -> list[Problem]:
    adapters = _read_json(folder / ADAPTERS)
    if adapters is not None:
        base = str(adapters.get("base_model_name_or_path"))
        found = _check_folder(base, MODEL) or (_check_model(config, Path(base)) if Path(base).is_dir() else [])
        return [replace(problem, message=f"{folder} holds adapters of {base}: {problem.message}") for problem in found]
    problems = []
    settings = _read_json(folder / "config.json")
    if settings is None:
        fix = "give the folder that `save_pretrained` wrote"
        problems.append(Problem(MODEL, f"{folder} has no readable config.json", fix))
    elif "auto_map" in settings:
        message = f"{folder}/config.json names code of its own (auto_map), which is never run"
        problems.append(Problem(MODEL, message, "use a family that transformers knows, and remove auto_map"))
    if config.init == "pretrained" and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            message = f"{folder} holds its weights as pickle ({pickles[0]}), which can run code; safetensors only"
            fix = "load them once where you trust them and save with save_pretrained, which writes safetensors"
        else:
            message = f"{folder} has no weights (*.safetensors)"
            fix = "give a folder with weights, or set finetuning.policy.init: random to draw them"
        problems.append(Problem(MODEL, message, fix))
    return problems


def _check_tokenizer(config: PolicyConfig) -> list[Problem]:
    path = MODEL if config.tokenizer is None else TOKENIZER
    folder = Path(config.tokenizer or config.model or "")
    if not folder.is_dir():
        return []
    settings = _read_json(folder / "tokenizer_config.json")
    problems = []
    if settings is None and not (folder / "tokenizer.json").is_file():
        message = f"{folder} has no tokenizer (tokenizer.json or tokenizer_config.json)"
        problems.append(Problem(path, message, "finetuning.policy.tokenizer names another folder or a hub id"))
    elif "auto_map" in (settings or {}):
        message = f"{folder}/tokenizer_config.json names code of its own (auto_map), which is never run"
        problems.append(Problem(path, message, "use a tokenizer that transformers knows, and remove auto_map"))
    has_template = "chat_template" in (settings or {}) or (folder / "chat_template.jinja").is_file()
    if not has_template and config.chat_template is None:
        message = f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        problems.append(Problem(path, message, f"{CHAT_TEMPLATE} gives one, as Jinja text or a file"))
    return problems


def _check_template_file(config: PolicyConfig) -> list[Problem]:
    template = config.chat_template
    if template is None or "{" in template or Path(template).is_file():
        return []
    message = f"there is no file {template}, and as Jinja text it has no {{{{ }}}}"
    return [Problem(CHAT_TEMPLATE, message, "give a file that exists, or the template itself")]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
