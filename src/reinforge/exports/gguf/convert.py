"""Writes the model of a GGUF file as a folder in transformers' layout, one tensor at a time.

Weights of 16 and 32 bits keep their type; quantized ones become the float32 numbers that they stand for, exactly.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from reinforge.engine.model.model_files import CONFIG, GENERATION_CONFIG, INDEX, MAKING
from reinforge.exports.gguf import families
from reinforge.exports.gguf.header import GGUFError, GGUFHeader, GGUFTensor
from reinforge.exports.gguf.tokenizer import find_ends, write_tokenizer

SHARD_BYTES = 2 << 30
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of GGUF that need no conversion; all others become float32."""


def convert(file: Path, header: GGUFHeader, folder: Path, *, tokenizer: bool = True) -> None:
    """Writes a file's model into a new folder: configuration, weights and, unless it is configured, the tokenizer."""
    config = families.describe_model(header)
    targets = match_tensors(header, config)
    folder.mkdir(parents=True)
    if tokenizer:
        write_tokenizer(folder, header)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if families.ROPE_FACTORS in header.tensors:
            factors = read_tensor(content, header.tensors[families.ROPE_FACTORS]).float()
            config["rope_parameters"] = families.find_llama3_rotation(
                config["rope_parameters"]["rope_theta"], factors.tolist()
            )
        _write_weights(folder, _iterate_tensors(content, header, config, targets))
    (folder / CONFIG).write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n", encoding="utf-8")
    ids: dict[str, Any] = {name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config}
    generation: dict[str, Any] = {**ids, "eos_token_id": find_ends(header) if tokenizer else config.get("eos_token_id")}
    (folder / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def match_tensors(header: GGUFHeader, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name in transformers of each tensor, after checking that names and shapes are those of the model."""
    settings = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with MAKING, torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    expected = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    targets = {name: families.name_tensor(name) for name in header.tensors if name != families.ROPE_FACTORS}
    found = {own: header.tensors[name].shape for name, own in targets.items() if own is not None}
    if strange := next((name for name, own in targets.items() if own not in expected), None):
        raise GGUFError(
            f"has the tensor {strange[:80]!r}, which {config['architectures'][0]} does not have", families.OTHER_FORM
        )
    if missing := sorted(expected.keys() - found.keys()):
        raise GGUFError(f"lacks {len(missing)} tensors of its model, such as {missing[0]}")
    if wrong := next((own for own, shape in expected.items() if found[own] != shape), None):
        raise GGUFError(f"has {wrong} in the shape {list(found[wrong])}; its settings ask for {list(expected[wrong])}")
    return {name: own for name, own in targets.items() if own is not None}


def read_tensor(content: mmap.mmap, entry: GGUFTensor) -> Tensor:
    raw = np.frombuffer(content[entry.start : entry.start + entry.num_bytes], dtype=np.uint8)
    if entry.type_name in DTYPES:
        return torch.from_numpy(raw.copy()).view(DTYPES[entry.type_name]).reshape(entry.shape)
    from gguf import GGMLQuantizationType, dequantize

    rows = raw.reshape(*entry.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, GGMLQuantizationType(entry.type))).reshape(entry.shape)


def restore_head_order(weights: Tensor, num_heads: int) -> Tensor:
    """Returns the rows of queries or keys in the order of transformers: the first halves of a head, then the second.

    Example: one head of 4 rows, `[0, 2, 1, 3]` in the file -> `[0, 1, 2, 3]`.
    """
    pairs = weights.reshape(num_heads, weights.shape[0] // num_heads // 2, 2, *weights.shape[1:])
    return pairs.transpose(1, 2).reshape(weights.shape)


def _iterate_tensors(
    content: mmap.mmap, header: GGUFHeader, config: Mapping[str, Any], targets: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    permutes = families.find_family(header).permutes_heads
    heads = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
    for name, own in targets.items():
        weights = read_tensor(content, header.tensors[name])
        if not weights.isfinite().all():
            raise GGUFError(f"has numbers in the tensor {name!r} that are not finite")
        number = next((setting for part, setting in heads.items() if part in own), None)
        if permutes and number is not None:
            weights = restore_head_order(weights, config[number])
        yield own, weights


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    numbers = count(1)
    shard: dict[str, Tensor] = {}
    names: dict[str, list[str]] = {}
    num_bytes = 0

    def write() -> None:
        file = f"model-{next(numbers):05d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, folder / file, {"format": "pt"})
        names[file] = list(shard)
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor
        num_bytes += tensor.nbytes
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            write()
    if shard:
        write()
    if len(names) == 1:
        (folder / next(iter(names))).rename(folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {n: file for file, held in names.items() for n in held},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def measure_folder(header: GGUFHeader) -> int:
    sizes = [(each.num_weights, DTYPES.get(each.type_name, torch.float32).itemsize) for each in header.tensors.values()]
    return sum(count * itemsize for count, itemsize in sizes)
