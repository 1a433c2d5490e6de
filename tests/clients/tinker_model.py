"""A tiny model for the recipes of tinker-cookbook: it knows what is right, and says something else half of the time.

    prompt "What is 3 + 4?" -> "7" or "0"

So training has something to reward from the first step on, and there is much to gain.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

WORDS = "User Assistant What is"
PIECES = r"\d+|[A-Za-z]+|\n+| |[^\w\s]"
STEPS, BATCH = 800, 16
NUM_BATCHES, GROUPS = 8, 4
"""The recipe's problems are drawn by its batch's number; these are the first ones."""


def make_tokenizer(texts: list[str]) -> Any:
    """Returns a tokenizer with a token for each number, word and sign of the texts, and each number up to 200."""
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [piece for text in [WORDS, *texts] for piece in re.findall(PIECES, text)]
    words = dict.fromkeys(["<unk>", "<end>", " ", "\n", "\n\n", *pieces, *map(str, range(201))])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    return fast


def list_examples() -> list[tuple[list[dict[str, str]], str, str]]:
    """Returns problems of the recipe, each with the right answer and a wrong one."""
    import numpy as np
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv

    examples = []
    for batch in range(NUM_BATCHES):
        rng = np.random.RandomState(None)
        rng.seed(batch)
        for _ in range(GROUPS):
            x, y = rng.randint(0, 101), rng.randint(0, 101)
            prefix = ArithmeticEnv.standard_fewshot_prefix()
            examples.append(([*prefix, {"role": "user", "content": f"What is {x} + {y}?"}], str(x + y), "0"))
    return examples


def make_model(folder: Path) -> Path:
    """Writes the model to a folder, unless it is there already, and returns the folder."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from tinker_cookbook import renderers
    from transformers import LlamaConfig, LlamaForCausalLM

    examples = list_examples()
    texts = [turn["content"] for turns, *_ in examples for turn in turns]
    tokenizer = make_tokenizer(texts)
    renderer = renderers.get_renderer("role_colon", tokenizer)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer, picks = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(1)
    rows = []
    for turns, *replies in examples:
        prompt = renderer.build_generation_prompt(turns).to_ints()
        rows += [(prompt, tokenizer.encode(f" {reply}\n\nUser:", add_special_tokens=False)) for reply in replies]
    for _ in range(STEPS):
        chosen = picks.sample(rows, BATCH)
        width = max(len(prompt) + len(reply) for prompt, reply in chosen)
        token_ids = torch.full((BATCH, width), tokenizer.eos_token_id)
        labels = torch.full((BATCH, width), -100)
        for row, (prompt, reply) in enumerate(chosen):
            token_ids[row, : len(prompt) + len(reply)] = torch.tensor(prompt + reply)
            labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
        loss = model(input_ids=token_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
