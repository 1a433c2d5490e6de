"""The model that a GGUF header describes, as transformers knows it: its configuration and the names of its tensors.

    general.architecture llama, llama.block_count 30, blk.0.attn_q.weight ...
    =>  {"model_type": "llama", "num_hidden_layers": 30, ...}
        {"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight", ...}

Only what computes exactly the same is accepted: a setting of the file that transformers' model would not follow is an
error, never left out. Needs no torch, no transformers and no gguf.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from reinforge.exports.gguf.header import GGUFError, GGUFHeader

NUMBER = (int, float)
ROPE_FACTORS = "rope_freqs.weight"
"""What Llama 3 divides its rotation frequencies by; a configuration has it as `rope_type: llama3`."""
DECISIVE = re.compile(r"expert|scale$|softcap|sliding_window|rope\.scaling|causal|pooling|nextn|clamp|swin|ssm")
"""Settings by which a model computes something else; those that are not read are refused."""
OTHER_FORM = "use the model's safetensors: its folder, or its hub id"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TENSOR = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<name>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """One architecture of GGUF: the class of transformers and its `model_type`."""

    class_name: str
    model_type: str
    permutes_heads: bool = False
    """llama.cpp's file has the rows of queries and keys in the order that its rotation reads them."""


FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", permutes_heads=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3"),
}
"""By `general.architecture`. Mistral's files up to version 0.3 and Nemo are `llama`."""


def describe_model(header: GGUFHeader) -> dict[str, Any]:
    """Returns the `config.json` of a file's model, without its dtype."""
    family = find_family(header)
    settings = _Settings(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("has no embedding (token_embd.weight): it is not a language model, or a part of one")
    hidden, heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", settings.count("rope.dimension_count", hidden // heads))
    _refuse_other_shapes(settings, head_dim)
    context = settings.count("context_length")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": _round_single(settings.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _describe_rotation(header, settings, head_dim, context),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
    }
    if family.model_type in ("llama", "qwen3") and "blk.0.attn_q.bias" in header.tensors:
        config["attention_bias"] = True
    if family.model_type == "llama" and "blk.0.ffn_up.bias" in header.tensors:
        config["mlp_bias"] = True
    window = settings.count("attention.sliding_window", 0, smallest=0)
    if 0 < window < context:
        if family.model_type != "llama":
            raise GGUFError(f"has sliding windows ({window}), but does not say in which layers", OTHER_FORM)
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    settings.refuse_unread()
    return {**config, **_describe_ends(header, embedding.shape[0])}


def find_family(header: GGUFHeader) -> GGUFFamily:
    """Returns the family of a file's architecture; a file that is one part of a model is refused."""
    if header.get("split.count", int, 1) > 1:
        raise GGUFError(
            "is one of several parts of a model", "join them: `llama-gguf-split --merge FIRST.gguf ONE.gguf`"
        )
    name = header.architecture
    if name not in FAMILIES:
        origin = header.settings.get("general.base_model.0.repo_url") or header.settings.get("general.source.url")
        fix = f"{OTHER_FORM}{f' ({origin[:200]})' if isinstance(origin, str) else ''}"
        raise GGUFError(
            f"has the architecture {name[:60]!r}; reinforge reads {', '.join(FAMILIES)} from GGUF (Mistral is llama)",
            fix,
        )
    return FAMILIES[name]


def name_tensor(name: str) -> str | None:
    """Returns the name in transformers of a tensor of GGUF; None: it has none.

    Example: `blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`; `rope_freqs.weight` -> None.
    """
    match = TENSOR.fullmatch(name)
    if match is None:
        return None
    if match["layer"] is None:
        own = MODEL_NAMES.get(match["name"])
        return own and f"{own}.{match['kind']}"
    own = LAYER_NAMES.get(match["name"])
    return own and f"model.layers.{int(match['layer'])}.{own}.{match['kind']}"


class _Settings:
    """The settings of a header's architecture, which remember what was read."""

    def __init__(self, header: GGUFHeader):
        self._header, self._prefix = header, f"{header.architecture}."
        self._read: set[str] = set()

    def find(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        self._read.add(name)
        return self._header.get(self._prefix + name, kind, default)

    def count(self, name: str, default: int | None = None, smallest: int = 1) -> int:
        value = self.find(name, int, default)
        return int(self._check(name, value, not isinstance(value, bool) and smallest <= (value or 0) < 1 << 31))

    def number(self, name: str, default: float | None = None) -> float:
        value = self.find(name, NUMBER, default)
        return float(self._check(name, value, 0 < (value or 0) < math.inf))

    def _check(self, name: str, value: Any, is_usable: bool) -> Any:
        if value is None or not is_usable:
            found = "it is missing" if value is None else f"found {value}"
            raise GGUFError(f"has an unusable setting {self._prefix}{name}: {found}")
        return value

    def refuse_unread(self) -> None:
        for key, value in self._header.settings.items():
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in self._read and value and DECISIVE.search(name):
                raise GGUFError(f"sets {key} to {str(value)[:40]}, which its model here would not follow", OTHER_FORM)


def _refuse_other_shapes(settings: _Settings, head_dim: int) -> None:
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := settings.count(name, head_dim)) != head_dim:
            raise GGUFError(f"has heads of {head_dim} numbers, but {name} {found}, which is not supported", OTHER_FORM)
    if settings.count("expert_count", 0, smallest=0):
        raise GGUFError("is a mixture of experts, which is not read from GGUF", OTHER_FORM)


def _describe_rotation(header: GGUFHeader, settings: _Settings, head_dim: int, context: int) -> dict[str, Any]:
    base = _round_single(settings.number("rope.freq_base", 10000.0))
    kind = settings.find("rope.scaling.type", str, "none")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": settings.number("rope.scaling.factor")}
    elif kind != "none":
        raise GGUFError(f"scales its positions by {kind!r}, which is not supported", OTHER_FORM)
    if kind == "yarn":
        original = settings.count("rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = original
    elif kind == "none":
        settings.find("rope.scaling.factor", NUMBER)
        settings.find("rope.scaling.original_context_length", int)
    if ROPE_FACTORS in header.tensors and header.tensors[ROPE_FACTORS].shape != (head_dim // 2,):
        raise GGUFError(f"has the tensor {ROPE_FACTORS!r} in another shape than [{head_dim // 2}]")
    return parameters


def find_llama3_rotation(base: float, factors: list[float]) -> dict[str, Any]:
    """Returns the `rope_parameters` of Llama 3 that give these divisors of the rotation frequencies.

    Example: divisors 1 for short wavelengths, 32 for those above 8192 positions, and a ramp between these
    -> `{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ...}`.
    """
    found = {"factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (8192, 4096, 16384, 32768):
        if all(
            math.isclose(factor, _llama3_divisor(base ** (-index / len(factors)), original, **found), rel_tol=1e-3)
            for index, factor in enumerate(factors)
        ):
            parameters = {"rope_type": "llama3", "rope_theta": base, "original_max_position_embeddings": original}
            return parameters | found
    raise GGUFError("scales its positions by divisors of its own (rope_freqs.weight), unlike Llama 3", OTHER_FORM)


def _llama3_divisor(
    frequency: float, original: int, *, factor: float, low_freq_factor: float, high_freq_factor: float
) -> float:
    turns = original * frequency / (2 * math.pi)
    if turns < low_freq_factor:
        return factor
    if turns > high_freq_factor:
        return 1.0
    smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return 1 / ((1 - smooth) / factor + smooth)


def _describe_ends(header: GGUFHeader, vocab_size: int) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: header.find_token(key, vocab_size) for name, key in names.items()}
    return {name: token for name, token in found.items() if token is not None}


def _round_single(value: float) -> float:
    return float(f"{value:.6g}")
