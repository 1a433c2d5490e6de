"""Tiny models of today's architectures, by what their layers keep between tokens.

Each entry is a `model_type` of transformers, with `_window` where it has variants, and what its tiny configuration
needs besides the sizes of `tests/models.py`.
"""

from pathlib import Path
from typing import Any

from tests.models import SIZES, make_tiny_model, make_tokenizer

HYBRID_MIX = ["linear_attention", "full_attention"]
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
WINDOW = {"sliding_window": 8}
SHARED_KEYS = {
    **WINDOW,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
MIXED_WINDOW = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "head_dim": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
ZAMBA = {
    "num_hidden_layers": 3,
    "layers_block_type": ["mamba", "hybrid", "mamba"],
    "mamba_d_state": 8,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "chunk_size": 8,
    "num_key_value_heads": 4,
    "num_mem_blocks": 1,
    "use_mamba_kernels": False,
}
KIMI = {
    **LATENT,
    **LOCAL_EXPERTS,
    "q_lora_rank": None,
    "moe_intermediate_size": 32,
    "layer_types": HYBRID_MIX,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mlp_layer_types": ["dense", "sparse"],
}
LLAMA4 = {
    **LOCAL_EXPERTS,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
    "head_dim": 16,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
}
JAMBA = {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # recurrent states
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **SHARED_EXPERT},
    "qwen3_next": {**DELTA_NET, **SHARED_EXPERT},
    "olmo_hybrid": {**DELTA_NET, "linear_num_key_heads": 4, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **EXPERTS},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL_EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {**JAMBA, "use_mamba_kernels": False},
    "nemotron_h": NEMOTRON,
    "zamba2": ZAMBA,
    "kimi_linear": KIMI,
    # experts
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "qwen2_moe": SHARED_EXPERT,
    "mixtral": LOCAL_EXPERTS,
    "gpt_oss": {**LOCAL_EXPERTS, **WINDOW, "head_dim": 16},
    "granitemoe": LOCAL_EXPERTS,
    "olmoe": EXPERTS,
    "glm4_moe": {**ROUTED, "n_shared_experts": 1, "head_dim": 16},
    "deepseek_v3": {**ROUTED, **LATENT},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "llama4_text": LLAMA4,
    # windows
    "qwen2_window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "ministral": {**MIXED_WINDOW, "head_dim": 16},
    "olmo3": MIXED_WINDOW,
    "gemma4_text": SHARED_KEYS,
    "gemma3n_text": {**SHARED_KEYS, "laurel_rank": 8},
    "cohere2": MIXED_WINDOW,
    "exaone4": MIXED_WINDOW,
    "smollm3": {},
    "granite": {},
}
KINDS = ("qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "gemma4_text", "llama4_text", "deepseek_v3")
"""One for each kind of cache: states, convolutions, states with keys, states alone, shared keys, chunks, latent."""


def make_tiny_architecture(path: Path, name: str) -> Path:
    """Writes a random model of an architecture with its tokenizer to `path` and returns it."""
    return make_tiny_model(path, name.removesuffix("_window"), **ARCHITECTURES[name])


QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": DELTA_NET, "vision_config": QWEN_VISION},
    "qwen3_vl": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "vision_config": QWEN_VISION,
    },
    "gemma3": {"text_config": {**WINDOW, "head_dim": 16}, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": SHARED_KEYS,
        "vision_config": {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": SIGLIP},
    "mistral3": {
        "text_config": {"model_type": "mistral", **WINDOW},
        "vision_config": {**SIGLIP, "model_type": "pixtral", "head_dim": 16},
    },
    "llama4": {
        "text_config": LLAMA4,
        "vision_config": {**SIGLIP, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
}
"""Configurations of multimodal checkpoints, whose text part is used."""


def make_tiny_multimodal(path: Path, family: str, seed: int = 0) -> Path:
    """Writes a random multimodal model, as its publisher would, with its tokenizer to `path` and returns it."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    tokenizer = make_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    parts = {
        name: dict(part) if part is not None else None
        for name, part in MULTIMODAL[family].items()
        if isinstance(part, dict | None)
    }
    parts["text_config"] = {**SIZES, "initializer_range": 0.1, **ids, **parts["text_config"]}
    rest = {name: value for name, value in MULTIMODAL[family].items() if name not in parts}
    tokens = dict.fromkeys(("image_token_id", "image_token_index"), 300)
    config = AutoConfig.for_model(family, **parts, **rest, **ids, **tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
