"""Writes a Llama, Mistral, Qwen2 or Qwen3 as a GGUF file, by the package `gguf`.

    model.layers.3.self_attn.q_proj.weight  -> blk.3.attn_q.weight, rows permuted for the architecture `llama`
    model.embed_tokens.weight               -> token_embd.weight; a tied output layer is left out
    config.json                             -> llama.block_count, llama.attention.head_count, llama.rope.freq_base, ...

transformers rotates the halves of a head, (x_i, x_{i + d/2}); llama.cpp's architecture `llama` rotates neighbors,
(x_2i, x_2i+1), so the rows of each head of q and k are interleaved. qwen2 and qwen3 rotate halves there, too.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.errors import ConfigError, Problem
from reinforge.exports.gguf.tokenizer import SPLITS, Split
from reinforge.files import storage_boundary
from reinforge.types.request import ModelRequest

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture by `model_type`."""
PERMUTED = {"llama"}  # architectures of llama.cpp that rotate neighbors
BIASES = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
}
"""Layers whose biases llama.cpp reads."""
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
INSTALL = 'pip install "reinforge[gguf]"'
FORMAT = "--format gguf"
CONVERTER = (
    "export with --format merged, and convert that folder with llama.cpp's own converter: "
    "python convert_hf_to_gguf.py FOLDER --outfile model.gguf"
)
OTHER_PROGRAMS = "use --format merged: transformers, vLLM and `reinforge serve` load that folder"
CHUNK_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class GgufSettings:
    file_type: str  # `f32`, `f16`, `bf16` or `q8_0`: how matrices are stored; vectors are always float32
    name: str
    sampling: SamplingConfig  # how the model was sampled in training
    license: str | None = None  # that of the base model, if it is known; so is its name below
    base: str | None = None


def check_gguf_package() -> list[Problem]:
    if importlib.util.find_spec("gguf") is not None:
        return []
    return [Problem(FORMAT, "writing a GGUF file needs the package gguf, which is not installed", INSTALL)]


def check_architecture(config: Any) -> list[Problem]:
    """Returns why a model cannot be written, by its configuration or an object with the same attributes."""
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        return [_describe(f"the architecture {kind!r} is not one of {', '.join(ARCHITECTURES)}")]
    problems, rope = [], _read_rope(config)
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        problems.append(_describe(f"its activation is {config.hidden_act}, but llama.cpp computes silu"))
    allowed = ("default", "linear", "llama3") if ARCHITECTURES[kind] == "llama" else ("default", "linear")
    if rope.get("rope_type", "default") not in allowed:
        problems.append(_describe(f"its rope type {rope['rope_type']!r} is not one of {', '.join(allowed)}"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(_describe("it rotates only a part of each head"))
    return problems


def check_tokenizer(tokenizer: Any) -> list[Problem]:
    try:
        name_pre_tokenizer(_read_definition(tokenizer))
    except ConfigError as error:
        return list(error.problems)
    return []


def write_gguf(path: Path, module: Any, tokenizer: Any, settings: GgufSettings) -> Vocabulary:
    """Writes a model with its tokenizer into one file; returns the vocabulary that it holds."""
    if problems := [*check_gguf_package(), *check_architecture(module.config)]:
        raise ConfigError(problems)
    import gguf

    config, architecture = module.config, ARCHITECTURES[module.config.model_type]
    ends = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    vocabulary = build_vocabulary(tokenizer, module.get_input_embeddings().weight.shape[0], ends)
    num_bytes = sum(each.numel() for each in module.parameters()) * {"f32": 4, "q8_0": 1}.get(settings.file_type, 2)
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _add_settings(writer, module, settings)
        _add_hyper_parameters(writer, config)
        _add_vocabulary(writer, vocabulary)
        with torch.no_grad():
            for name, tensor in _iterate_tensors(module, architecture):
                content, kind = store(tensor, settings.file_type)
                writer.add_tensor(name, content, raw_dtype=kind)
        with storage_boundary(path, num_bytes):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
    finally:
        writer.close()
    return vocabulary


def permute_heads(weight: Tensor, num_heads: int) -> Tensor:
    """Returns the rows of q or k with the halves of each head interleaved.

    Example: one head of 4 rows [a0, a1, b0, b1] -> [a0, b0, a1, b1].
    """
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def store(tensor: Tensor, file_type: str) -> tuple[Any, Any]:
    """Returns a tensor's bytes as an array, and GGUF's type for them.

    Vectors stay float32; a matrix whose rows cannot be split into blocks of 32 is stored as float16 in place of q8_0.
    """
    import gguf

    kinds = gguf.GGMLQuantizationType
    values: Any = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    if values.ndim == 1 or file_type == "f32":
        return values, kinds.F32
    if file_type == "f16" or (file_type == "q8_0" and values.shape[-1] % 32):
        return values.astype(np.float16), kinds.F16
    kind = kinds.BF16 if file_type == "bf16" else kinds.Q8_0
    chunks = [gguf.quantize(values[row : row + CHUNK_ROWS], kind) for row in range(0, len(values), CHUNK_ROWS)]
    return np.concatenate(chunks), kind


def _iterate_tensors(module: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    import gguf

    config = module.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for path, parameter in module.named_parameters():
        layer, _, part = path.rpartition(".")
        last, name = layer.rpartition(".")[2], names.get_name(path, try_suffixes=(".weight", ".bias"))
        if name is None or (part == "bias" and last not in BIASES.get(architecture, ())):
            raise ConfigError(_describe(f"llama.cpp's architecture {architecture} has no tensor for {path}"))
        tensor = parameter.data
        if architecture in PERMUTED and last in heads:
            tensor = permute_heads(tensor, heads[last])
        yield name, tensor
    if _read_rope(config).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _compute_frequency_factors(module)


def _compute_frequency_factors(module: Any) -> Tensor:
    """Returns by what llama.cpp divides each rotation frequency: theta^(-2i/d) over that of the scaled model."""
    config = module.config
    size = _head_size(config)
    plain = _read_rope(config)["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    scaled = module.get_decoder().rotary_emb.inv_freq.to("cpu", torch.float64)
    return (plain / scaled).float()


def _add_settings(writer: Any, module: Any, settings: GgufSettings) -> None:
    writer.add_type("model")
    writer.add_name(settings.name)
    writer.add_file_type(FILE_TYPES[settings.file_type])
    writer.add_quantization_version(2)
    if settings.license is not None:
        writer.add_license(settings.license)
    if settings.base is not None:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, settings.base)
    sampling = settings.sampling
    writer.add_sampling_temp(sampling.temperature)
    writer.add_sampling_top_p(sampling.top_p)
    writer.add_sampling_top_k(sampling.top_k)
    writer.add_sampling_min_p(sampling.min_p)
    writer.add_sampling_penalty_repeat(1.0)


def _add_hyper_parameters(writer: Any, config: Any) -> None:
    rope, size = _read_rope(config), _head_size(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(find_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(False)
    adders = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token in zip(adders, vocabulary.ends, strict=False):  # further ends are in the Modelfile
        add(token)
    special = ((writer.add_bos_token_id, vocabulary.bos), (writer.add_pad_token_id, vocabulary.pad))
    for add, index in (*special, (writer.add_unk_token_id, vocabulary.unknown)):
        if index is not None:
            add(index)
    writer.add_chat_template(vocabulary.chat_template)


def find_context_length(config: Any) -> int:
    """Returns the longest context: at most a sliding window, since llama.cpp attends to all of the context."""
    length = int(config.max_position_embeddings)
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds is not None else getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None)
    return min(length, int(window)) if slides and window else length


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _read_rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    return rope


def _describe(message: str) -> Problem:
    return Problem(FORMAT, f"cannot write this model as GGUF: {message}", CONVERTER)


NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # GGUF's types of tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[str, ...]  # one for each row of the embeddings, in the spelling of byte-level BPE
    types: tuple[int, ...]  # GGUF's type of each token
    merges: tuple[str, ...]  # pairs of tokens, separated by a space, the first to merge first
    pre: str  # llama.cpp's name of the pre-tokenizer
    ends: tuple[int, ...]  # tokens that end a reply, the tokenizer's own first
    bos: int | None
    pad: int | None
    unknown: int | None
    adds_bos: bool  # llama.cpp begins every prompt with `bos`
    chat_template: str


def build_vocabulary(tokenizer: Any, num_rows: int, ends: Sequence[int]) -> Vocabulary:
    """Returns the vocabulary of a Hugging Face tokenizer.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        num_rows: Rows of the embeddings; those without a token are unused ones.
        ends: Tokens that end a reply.
    """
    definition = _read_definition(tokenizer)
    pre = name_pre_tokenizer(definition)
    names = {index: name for name, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    # transformers adds tokens of the family that a model may have no embedding for; text that has one cannot be run
    if missing := [index for index in names if index >= num_rows and index not in added]:
        raise ConfigError(_describe(f"the token {names[missing[0]]!r} has no embedding: the model has {num_rows} rows"))
    special = {index for index, token in added.items() if token.special}
    types = [
        UNUSED if i not in names else CONTROL if i in special else USER_DEFINED if i in added else NORMAL
        for i in range(num_rows)
    ]

    def keep(token: int | None) -> int | None:
        return token if token is not None and token < num_rows else None

    template = tokenizer.chat_template
    template = template.get("default", next(iter(template.values()))) if isinstance(template, dict) else template
    return Vocabulary(
        tokens=tuple(names.get(index, f"[PAD{index}]") for index in range(num_rows)),
        types=tuple(types),
        merges=tuple(each if isinstance(each, str) else " ".join(each) for each in definition["model"]["merges"]),
        pre=pre,
        ends=tuple(dict.fromkeys(end for end in map(keep, (tokenizer.eos_token_id, *ends)) if end is not None)),
        bos=keep(tokenizer.bos_token_id),
        pad=keep(tokenizer.pad_token_id),
        unknown=keep(tokenizer.unk_token_id),
        adds_bos=_adds_bos(tokenizer),
        chat_template=template,
    )


def name_pre_tokenizer(definition: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the pre-tokenizer in the content of a `tokenizer.json`.

    llama.cpp has the regular expressions of pre-tokenizers in its source, by name (`tokenizer.ggml.pre`). The name is
    found by what the tokenizer does, not by the model's name:

        Digits, ByteLevel with its regex                             -> smollm
        Split by Qwen2's regex, ByteLevel without a regex            -> qwen2
        Split by Llama 3's regex, merges ignored for known pieces    -> llama-bpe
        anything else                                                -> refused: text would become other tokens
    """
    model, normalizer = definition["model"], definition.get("normalizer")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        kind = "BPE with byte fallback (SentencePiece)" if model.get("type") == "BPE" else model.get("type")
        raise ConfigError(_describe(f"its tokenizer is {kind}; this writer knows byte-level BPE"))
    if normalizer is not None and normalizer.get("type") != "NFC":  # llama.cpp leaves out NFC for these models, too
        raise ConfigError(
            _describe(f"its tokenizer normalizes text by {normalizer.get('type')}, which llama.cpp does not")
        )
    steps = list(_read_steps(definition.get("pre_tokenizer")))
    split = _describe_steps(steps, ignores_merges=bool(model.get("ignore_merges")))
    name = next((name for name, known in SPLITS.items() if split == replace(known, composes=False)), None)
    if name is None:
        text = json.dumps(definition.get("pre_tokenizer"))[:300]
        message = f"llama.cpp has no name for its pre-tokenizer, or none that is known here ({', '.join(SPLITS)})"
        raise ConfigError(replace(_describe(f"{message}: {text}"), fix=OTHER_PROGRAMS))
    return name


def _describe_steps(steps: list[dict[str, Any]], *, ignores_merges: bool) -> Split | None:
    """Returns how text is split before merging; None: in another way than any that GGUF has a name for."""
    digits = [step for step in steps if step["type"] == "Digits"]
    others = steps[1:] if steps and steps[0] in digits else steps
    if any(not step.get("individual_digits") for step in digits) or any(step in digits for step in others):
        return None
    *splits, last = others or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space") or len(splits) > 1:
        return None
    if splits and not (last.get("use_regex") is False and _keeps_all_pieces(splits[0])):
        return None
    if not splits and last.get("use_regex") is False:
        return None
    pattern = splits[0]["pattern"].get("Regex") if splits else None
    return Split(pattern, by_digit=bool(digits), ignores_merges=ignores_merges)


def _keeps_all_pieces(step: dict[str, Any]) -> bool:
    how = (step.get("behavior"), step.get("invert", False))
    return step["type"] == "Split" and how in (("Isolated", False), ("Removed", True))


def _read_steps(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if node is None:
        return
    if node["type"] == "Sequence":
        for each in node["pretokenizers"]:
            yield from _read_steps(each)
    else:
        yield node


def _read_definition(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            _describe("its tokenizer is not one of the tokenizers library, so its definition cannot be read")
        )
    definition: dict[str, Any] = json.loads(backend.to_str())
    return definition


def _adds_bos(tokenizer: Any) -> bool:
    """Returns True if llama.cpp puts the BOS token before every prompt, as the tokenizer does before every text.

    With it, llama.cpp begins chat prompts with one, too, and removes that of the template. So where the tokenizer adds
    one but the template does not, what training saw comes first: chat prompts have none.
    """
    bos = tokenizer.bos_token_id
    prompt = PromptRenderer(tokenizer).render(ModelRequest([{"role": "user", "content": "a"}]))
    return bos is not None and prompt[:1] == (bos,) and bool(tokenizer.encode("a")[0] == bos)
