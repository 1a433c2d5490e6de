"""A tiny model for the recipes of tinker-cookbook: it has learned something of each, and does it half of the time.

    math_rl       "What is 3 + 4?" -> "7" or "0"
    shorter       "Who are you?"   -> one word or many; a third of the replies do not end in time
    guess_number  "Too low"        -> "Guess: 41", or "41", which is not the format of the game

So training has something to reward from the first step on, and there is much to gain.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

Turns = list[dict[str, str]]
PIECES = r"\d+|[A-Za-z]+|\n+| |[^\w\s]"
STEPS, BATCH = 1600, 16
NUM_BATCHES, GROUPS = 8, 4
"""The arithmetic problems are drawn by their batch's number; these are the first ones."""
CHATS, MEAN_WORDS, MAX_WORDS = 256, 32, 48
GAMES, MAX_NUMBER = 512, 200


class Example(NamedTuple):
    """A conversation, and what the model may say next."""

    turns: Turns
    reply: str


def list_problems() -> list[tuple[Turns, str, str]]:
    """Returns problems of `math_rl`, each with the right answer and a wrong one."""
    import numpy as np
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv

    problems = []
    for batch in range(NUM_BATCHES):
        rng = np.random.RandomState(None)
        rng.seed(batch)
        for _ in range(GROUPS):
            x, y = rng.randint(0, 101), rng.randint(0, 101)
            prefix = ArithmeticEnv.standard_fewshot_prefix()
            problems.append(([*prefix, {"role": "user", "content": f"What is {x} + {y}?"}], str(x + y), "0"))
    return problems


def list_chats(picks: random.Random) -> list[Example]:
    """Returns replies to the question of `shorter`: each may end after any word."""
    from tinker_cookbook.recipes.preference.shorter.env import CONVO_PREFIX

    lengths = [min(1 + int(picks.expovariate(1 / MEAN_WORDS)), MAX_WORDS) for _ in range(CHATS)]
    return [Example(CONVO_PREFIX, " ".join(["hello"] * length)) for length in lengths]


def list_games(picks: random.Random) -> list[Example]:
    """Returns turns of `guess_number`: a guess in the format of the game, or the number alone."""
    from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import FAIL_TO_PARSE, MAX_TURNS, SYSTEM_PROMPT

    examples = []
    for _ in range(GAMES):
        turns: Turns = [{"role": "system", "content": SYSTEM_PROMPT}]
        for _ in range(picks.randrange(MAX_TURNS)):
            reply, answer = draw_guess(picks), picks.choice(["Too low", "Too high"])
            answer = answer if reply.startswith("Guess") else FAIL_TO_PARSE
            turns += [{"role": "player", "content": reply}, {"role": "user", "content": answer}]
        examples.append(Example(turns, draw_guess(picks)))
    return examples


def draw_guess(picks: random.Random) -> str:
    """Returns a guess, half of the time without the format."""
    return f"{picks.choice(['Guess: ', ''])}{picks.randint(0, MAX_NUMBER)}"


def make_tokenizer(texts: list[str]) -> Any:
    """Returns a tokenizer with a token for each number, word and sign of the texts, and each number up to 200."""
    import re

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [piece for text in texts for piece in re.findall(PIECES, text)]
    roles = ["User", "Assistant", "System", "Player"]
    numbers = map(str, range(MAX_NUMBER + 1))
    words = dict.fromkeys(["<unk>", "<end>", " ", "\n", "\n\n", *roles, *pieces, *numbers])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    return fast


def make_model(folder: Path) -> Path:
    """Writes the model to a folder and returns the folder."""
    import torch
    from tinker_cookbook import renderers
    from transformers import LlamaConfig, LlamaForCausalLM

    picks = random.Random(1)
    problems = [Example(turns, reply) for turns, *replies in list_problems() for reply in replies]
    tasks = [problems, list_chats(picks), problems, list_games(picks)]  # sums are the hardest
    examples = [example for task in tasks for example in task]
    texts = [turn["content"] for example in examples for turn in example.turns]
    tokenizer = make_tokenizer([*texts, *(example.reply for example in examples)])
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
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )

    def encode(example: Example) -> tuple[list[int], list[int]]:
        prompt = renderer.build_generation_prompt(example.turns).to_ints()
        return prompt, tokenizer.encode(f" {example.reply}\n\nUser:", add_special_tokens=False)

    rows = [[encode(example) for example in task] for task in tasks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        chosen = picks.sample(rows[step % len(rows)], BATCH)
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
