"""Tiny real models in a folder: a random Llama or Qwen2 and a tokenizer trained on a few sentences."""

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if tools %}<|tools|>{{ tools | length }}<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tools|>"]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "what is the capital of France? Paris is the capital of France.",
    "play at row 1 column 2, then at row 3 column 1",
    "answer with one word: yes, no, or maybe; then stop.",
    "0 1 2 3 4 5 6 7 8 9 10 + - * / = ( ) [ ] { }",
]
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16},
    "phi": {"num_key_value_heads": 4},
    "phi3": {"pad_token_id": 0, "bos_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
"""Families by `model_type`, with what their tiny models need besides the sizes."""


def make_tokenizer(vocab_size: int = SIZES["vocab_size"]) -> Any:
    """Returns a byte-level BPE tokenizer with a chat template, trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(path: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """Writes a random model of `family` ("llama", "qwen2", ...) with its tokenizer to `path` and returns it.

    Args:
        path: The folder, created if need be.
        family: A `model_type` of transformers.
        seed: Seed of the weights.
        config: Replaces or adds to the sizes (hidden 64, 2 layers, vocabulary 320).
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from reinforge.engine.checkpoint import hide_progress_bars

    sizes = {**SIZES, **config}
    tokenizer = make_tokenizer(sizes["vocab_size"])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model_config = AutoConfig.for_model(family, **{"initializer_range": 0.1, **ids, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    with hide_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of None removes the key."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))
