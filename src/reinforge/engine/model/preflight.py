"""Problems of a policy's model, found by looking at its files: no torch, no network, a few milliseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from reinforge.bounded import load_json
from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.architecture import find_untrainable
from reinforge.engine.model.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    TOKENIZER_CONFIG,
    check_files,
    check_tokenizer_settings,
    find_base,
    read_json,
)
from reinforge.engine.model.source import (
    GGUF,
    MODEL,
    REVISION,
    TOKENIZER,
    ModelSource,
    find_base_source,
    find_source,
    find_tokenizer_source,
    get_gguf,
)
from reinforge.engine.packages import BITSANDBYTES, is_installed
from reinforge.errors import ConfigError, Problem, did_you_mean

LORA = "finetuning.policy.lora"
QUANTIZATION = "finetuning.policy.quantization"
CHAT_TEMPLATE = "finetuning.policy.chat_template"
PLAIN_NAMES = {"llama", "mistral", "qwen2", "qwen3"}
"""Families whose files name tensors as their modules are called; transformers renames those of many others."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_READ = 1 << 20
LARGEST_HEADER = 100 << 20  # largest header that safetensors reads


def check_policy(config: PolicyConfig) -> list[Problem]:
    """Returns every problem of the model that a policy names; checking a hub id is left to transformers."""
    if config.model is None:
        return [Problem(MODEL, "no model is named", "name the folder or the hub id of a Hugging Face model")]
    if config.model.startswith("bundled:"):
        problems = _check_template_file(config) or (_check_template(config, None) if config.chat_template else [])
        if config.revision is not None:
            message = f"{config.model} is not a hub id, so it has no revision"
            problems.append(Problem(REVISION, message, "remove revision"))
        return problems
    problems, model = _find(config.model, MODEL, config.revision)
    problems += _check_model(config, model) if model is not None else []
    if config.lora is not None and config.init == "random":
        message = "adapters trained on random weights cannot be used with any published model"
        problems.append(Problem(LORA, message, "remove either lora or init: random"))
    problems += _check_quantization(config, model)
    tokenizer = None
    if config.tokenizer is not None:
        found, tokenizer = _find(config.tokenizer, TOKENIZER)
        problems += found
    elif model is not None and (not problems or model.is_folder):
        tokenizer = find_tokenizer_source(config)
    problems += _check_tokenizer(config, tokenizer) if tokenizer is not None else []
    return problems + (_check_template_file(config) or _check_template(config, tokenizer))


def _check_quantization(config: PolicyConfig, model: ModelSource | None) -> list[Problem]:
    """Returns why this policy's base model cannot be kept in 4 bits."""
    if config.quantization is None:
        return []
    problems = []
    if model is not None and model.is_folder and (Path(model.location) / ADAPTER_CONFIG).is_file():
        message = f"{config.model} already has adapters, and only a base model is kept in {config.quantization}"
        problems.append(Problem(QUANTIZATION, message, "name the base model, or remove quantization"))
    elif config.lora is None:
        message = f"weights in {config.quantization} are frozen, so without lora nothing is trained"
        problems.append(Problem(QUANTIZATION, message, "set finetuning.policy.lora, {} for its defaults"))
    if not is_installed(BITSANDBYTES):
        fix = 'pip install "reinforge[qlora]", or remove quantization'
        problems.append(Problem(QUANTIZATION, f"{config.quantization} needs bitsandbytes, which is not installed", fix))
    return problems


def check_adapters(config: PolicyConfig, names: Sequence[str], *, critic: bool) -> list[Problem]:
    """Returns why this policy cannot have adapters of these names.

    Args:
        names: The names; empty: one policy without named adapters.
    """
    if not names:
        return []
    listed = ", ".join(names)
    is_adapter = config.model is not None and (Path(config.model) / ADAPTER_CONFIG).is_file()
    problems = []
    if config.lora is None and not (is_adapter and len(names) == 1):
        problems.append(
            Problem(LORA, f"llms names the adapters {listed}, but LoRA is off", "set it to {} for its defaults")
        )
    if is_adapter and len(names) > 1:
        message = f"{config.model} already has an adapter, but each of {listed} must start from the base model"
        problems.append(
            Problem(MODEL, message, "name the base model here, and load the saved adapter into one of them")
        )
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        problems.append(
            Problem(LORA, f"adapter names must differ and contain only letters, digits and _, found {listed}")
        )
    if config.lora is not None and config.lora.modules_to_save and len(names) > 1:
        message = f"{', '.join(config.lora.modules_to_save)} cannot be trained in full for several adapters ({listed})"
        fix = "remove modules_to_save: one batch samples all adapters over one copy of the model's own modules"
        problems.append(Problem(f"{LORA}.modules_to_save", message, fix))
    if critic and len(names) > 1:
        message = f"a critic reads one policy's features, so it cannot serve several adapters ({listed})"
        problems.append(Problem("finetuning.algorithm", message, "use an algorithm without a critic, such as grpo"))
    return problems


def has_adapters(config: PolicyConfig) -> bool:
    return config.lora is not None or (config.model is not None and (Path(config.model) / ADAPTER_CONFIG).is_file())


def looks_like_hub_id(name: str) -> bool:
    """Returns True for `owner/name`.

    Example: `Qwen/Qwen2.5-0.5B` -> True; `./models/mine` and `/models/mine` -> False.
    """
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")


def _find(name: str, path: str, revision: str | None = None) -> tuple[list[Problem], ModelSource | None]:
    """Returns what a name stands for, or why it stands for nothing."""
    try:
        source = find_source(name, path, revision)
    except ConfigError as error:
        return error.problems, None
    if source.is_folder or source.is_gguf:
        return [], source
    if Path(name).exists():
        fix = "give the folder that holds config.json, or a GGUF file"
        return [Problem(path, f"{name} is a file, neither a folder nor GGUF", fix)], None
    is_gguf = name.lower().endswith(GGUF)
    if is_gguf or not looks_like_hub_id(name):
        kind = "file" if is_gguf else "folder"
        fix = "give a folder or a GGUF file that exists, or a hub id such as owner/name"
        return [Problem(path, f"there is no {kind} {name} (looked in {Path.cwd()})", fix)], None
    return [], source


def _check_model(config: PolicyConfig, source: ModelSource) -> list[Problem]:
    if source.is_gguf:
        return get_gguf().find_problems(source.location, MODEL, tokenizer=config.tokenizer is None)
    return _check_folder(config, Path(source.location)) if source.is_folder else []


def _check_adapter(config: PolicyConfig, folder: Path) -> list[Problem] | None:
    """Returns the problems of an adapter's base model; None: the folder holds a model of its own."""
    try:
        base = find_base_source(folder, MODEL)
        if base is None:
            return None
        found, source = _find(base.name, MODEL, base.revision)
    except ConfigError as error:
        return [replace(problem, message=f"{folder} holds adapters: {problem.message}") for problem in error.problems]
    if source is not None:
        found = _check_model(config.model_copy(update={"tokenizer": str(folder)}), source)
    return [replace(problem, message=f"{folder} holds adapters of {base.name}: {problem.message}") for problem in found]


def _check_folder(config: PolicyConfig, folder: Path) -> list[Problem]:
    problems = check_files(folder, MODEL, is_complete=config.init == "pretrained")
    if not problems and (found := _check_adapter(config, folder)) is not None:
        return found
    if problems and find_base(folder) is not None:  # such as an adapter that names itself as its base
        return problems
    settings = read_json(folder / CONFIG)
    if settings is None:
        files = sorted(folder.glob(f"*{GGUF}"))
        fix = f"name the file: {files[0]}" if files else "give the folder that `save_pretrained` wrote"
        return [*problems, Problem(MODEL, f"{folder} has no readable config.json", fix)]
    problems += [Problem(MODEL, f"{folder / CONFIG} {message}", fix) for message, fix in find_untrainable(settings)]
    if config.lora is not None and not problems:
        problems += _check_modules_to_save(config.lora.modules_to_save or [], folder, settings)
    if config.init == "pretrained" and not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            message = f"{folder} has only pickled weights ({pickles[0]}), which can run code; safetensors are required"
            fix = "convert the weights in a sandbox: load them and call save_pretrained, which writes safetensors"
        else:
            message = f"{folder} has no weights (*.safetensors)"
            fix = "give a folder with weights, or set finetuning.policy.init: random for random weights"
        problems.append(Problem(MODEL, message, fix))
    return problems


def _check_modules_to_save(names: Sequence[str], folder: Path, settings: dict[str, Any]) -> list[Problem]:
    """Returns the names that no module has, and those of tied weights, as far as the model's files show them."""
    if settings.get("model_type") not in PLAIN_NAMES:
        return []
    problems = []
    tensors = list(read_tensor_names(folder))
    for name in names:
        if settings.get("tie_word_embeddings") and name.rpartition(".")[2] in ("embed_tokens", "lm_head"):
            message = f"{name}: {folder}/config.json ties lm_head to embed_tokens, so neither can be trained alone"
            fix = f"remove {name}, or use a model without tied embeddings"
        elif tensors and not any(f".{name}." in f".{tensor}" for tensor in tensors):
            parts = {part for tensor in tensors for part in tensor.split(".")[:-1] if not part.isdecimal()}
            message = f'{folder} has no module "{name}"{did_you_mean(name, sorted(parts))}'
            fix = f"use one of: {', '.join(sorted(parts))}"
        else:
            continue
        problems.append(Problem(f"{LORA}.modules_to_save", message, fix))
    return problems


def read_tensor_names(folder: Path) -> Iterator[str]:
    for header in read_headers(folder):
        yield from (name for name in header if name != "__metadata__")


def read_headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what each safetensors file says of its tensors: it begins with 8 bytes of length and a JSON header."""
    for path in filter(Path.is_file, sorted(folder.glob("*.safetensors"))):
        try:
            with path.open("rb") as file:
                header = load_json(file.read(min(int.from_bytes(file.read(8), "little"), LARGEST_HEADER)))
        except (OSError, ValueError):
            continue  # loading the model reports a damaged file
        if isinstance(header, dict):
            yield header


def read_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yields the names and shapes of the tensors in a folder's safetensors files."""
    for name, entry in chain.from_iterable(header.items() for header in read_headers(folder)):
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            yield name, shape


def _check_tokenizer(config: PolicyConfig, source: ModelSource) -> list[Problem]:
    path = MODEL if config.tokenizer is None else TOKENIZER
    folder = Path(source.location)
    if source.is_gguf:
        return _check_gguf_tokenizer(config, source, path)
    if not folder.is_dir():
        return []
    settings = read_json(folder / TOKENIZER_CONFIG)
    problems = check_tokenizer_settings(folder, path)
    if settings is None and not (folder / "tokenizer.json").is_file():
        message = f"{folder} has no tokenizer (tokenizer.json or tokenizer_config.json)"
        problems.append(Problem(path, message, "set finetuning.policy.tokenizer to another folder or a hub id"))
    has_template = "chat_template" in (settings or {}) or (folder / "chat_template.jinja").is_file()
    if not has_template and config.chat_template is None:
        message = f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        problems.append(Problem(path, message, f"set {CHAT_TEMPLATE} to Jinja text or to a file"))
    return problems


def _check_gguf_tokenizer(config: PolicyConfig, source: ModelSource, path: str) -> list[Problem]:
    """Returns the problems of a GGUF file's tokenizer that those of its model do not include."""
    problems = [] if config.tokenizer is None else get_gguf().find_problems(source.location, path, tokenizer=True)
    if not problems and config.chat_template is None and get_gguf().get_chat_template(source.location, path) is None:
        message = f"{source.location} has no chat template (tokenizer.chat_template)"
        problems.append(Problem(path, message, f"set {CHAT_TEMPLATE} to Jinja text or to a file"))
    return problems


def _check_template_file(config: PolicyConfig) -> list[Problem]:
    template = config.chat_template
    if template is None or "{" in template or Path(template).is_file():
        return []
    message = f"there is no file {template}, and it is not Jinja text: it has no {{{{ }}}}"
    return [Problem(CHAT_TEMPLATE, message, "give a file that exists, or the template's text")]


def _check_template(config: PolicyConfig, tokenizer: ModelSource | None) -> list[Problem]:
    """Returns what makes the chat templates unusable, as far as they are in local files."""
    try:
        from reinforge.engine.prompts.template_sandbox import find_template_problem
    except ModuleNotFoundError:  # Jinja comes with torch, without which nothing is trained here
        return []
    problems = []
    for path, where, text in _find_templates(config, tokenizer):
        if (problem := find_template_problem(text)) is not None:
            fix = f"set {CHAT_TEMPLATE} to another template" if path != CHAT_TEMPLATE else "correct the template"
            problems.append(Problem(path, f"the chat template {where} {problem}", fix))
    return problems


def _find_templates(config: PolicyConfig, tokenizer: ModelSource | None) -> Iterator[tuple[str, str, str]]:
    """Yields the place in the configuration, a description and the text of each chat template in use."""
    given, path = config.chat_template, MODEL if config.tokenizer is None else TOKENIZER
    if given is not None:
        if "{" in given:
            yield CHAT_TEMPLATE, "in the configuration", given
        elif Path(given).is_file():
            yield CHAT_TEMPLATE, given, _read_start(Path(given))
    elif tokenizer is not None and tokenizer.is_gguf:
        template = get_gguf().get_chat_template(tokenizer.location, path)
        if template is not None:
            yield path, f"of {tokenizer.location}", template[:MAX_TEMPLATE_READ]
    elif tokenizer is not None and tokenizer.is_folder:
        yield from _find_folder_templates(Path(tokenizer.location), path)


def _find_folder_templates(folder: Path, path: str) -> Iterator[tuple[str, str, str]]:
    if (file := folder / TEMPLATE_FILE).is_file():
        yield path, str(file), _read_start(file)
    else:
        held = (read_json(folder / TOKENIZER_CONFIG) or {}).get("chat_template")
        entries = held if isinstance(held, list) else [{"template": held}]
        for entry in entries:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                yield path, f"of {folder / TOKENIZER_CONFIG}", entry["template"]


def _read_start(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_TEMPLATE_READ)
