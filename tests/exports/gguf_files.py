"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter writes them; and damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def name_in_gguf(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` -> `blk.1.ffn_up.weight`."""
    path, _, kind = name.rpartition(".")
    if path.startswith("model.layers."):
        _, _, layer, part = path.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[path]}.{kind}"


def order_pairs(weights: Any, num_heads: int) -> Any:
    """Rows of each head in the order of llama.cpp's rotation: first, first of the second half, second, ..."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, folder: Path, kind: str = "F32", *, pre: str = "gpt-2", **settings: Any) -> Path:
    """Writes the model of a folder as a GGUF file and returns the file.

    Args:
        path: The file.
        folder: A Llama, Mistral, Qwen2 or Qwen3 in transformers' layout, with a byte-level BPE tokenizer.
        kind: Type of the matrices, such as Q8_0; vectors stay float32.
        pre: The name of the tokenizer's way to split text.
        settings: More settings, or other ones; dots are written `__`, and None leaves one out.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    config, family = model.config, model.config.model_type
    family = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, family)
    values: dict[str, Any] = {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "general.license": "apache-2.0",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        **_list_tokens(folder),
    }
    if config.model_type == "mistral":
        values["llama.attention.sliding_window"] = config.sliding_window
    if family != "qwen2":
        values[f"{family}.attention.key_length"] = config.head_dim
    if family == "llama":
        values["llama.rope.dimension_count"] = config.head_dim
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    for name, value in values.items():
        _add(writer, name, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        weights = parameter.detach().numpy()
        number = heads.get(name.split(".")[-2])
        if family == "llama" and number is not None:
            weights = order_pairs(weights, number)
        type_ = gguf.GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
        data = gguf.quantize(weights, type_) if type_ > 1 else weights.astype("float32" if type_ == 0 else "float16")
        writer.add_tensor(name_in_gguf(name), data, raw_dtype=type_)
    if (scaling := config.rope_parameters).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divide_frequencies(config.head_dim, scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _list_tokens(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]  # a family's class may add tokens above
    ids = dict(sorted(((t, i) for t, i in tokenizer.get_vocab().items() if i < rows), key=lambda entry: entry[1]))
    special = set(tokenizer.all_special_tokens) | {token for token in ids if token.startswith("<|")}
    return {
        "tokenizer.ggml.tokens": list(ids),
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in ids],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _add(writer: Any, name: str, value: Any) -> None:
    if value is None or name == "general.architecture":
        return
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    adders.get(type(value), writer.add_string)(name, value)


def _divide_frequencies(head_dim: int, scaling: dict[str, Any]) -> Any:
    """Plain frequencies divided by those of transformers."""
    import numpy as np
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head_dim, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = scaling["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype("float32")


def pack_header(
    *, settings: int = 0, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF", rest: bytes = b""
) -> bytes:
    """A header by hand: magic number, version, two counts, and what follows."""
    return magic + struct.pack("<IQQ", version, tensors, settings) + rest


def pack_text(text: str) -> bytes:
    """A text as GGUF has it: its length, and its bytes."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def pack_tensor(name: str, shape: tuple[int, ...], type_: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; `shape` in the order of the file."""
    head = pack_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return head + struct.pack("<IQ", type_, offset)
