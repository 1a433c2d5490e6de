"""Models whose every token is a word that reads back as itself, so that token counts are exact on both sides.

A reply's text, rendered into the next turn's prompt, gives the tokens that were drawn: histories extend to the token
under any chat template. The token that ends replies is beyond the vocabulary: no model has a logit for it, so every
reply has its full length without a setting on either side.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
NEVER = "<|never|>"
TOKENIZER = "tokenizer"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
AROUND_FIRST, AROUND_NEXT = 3, 4
"""Marks that the template writes around a user's words: <user> <end> <assistant>, later with the reply's <end>."""

SIZES = {
    "1.7m": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "13m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
}
"""Qwen2-type: 1.64 and 12.7 million weights with a vocabulary of 320."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one step samples and trains on.

    Attributes:
        prompt: Tokens of the first prompt.
        reply: Tokens of each reply.
        context: Tokens that each further turn adds before its reply.
        turns: Replies of an episode.
        group: Episodes of a prompt.
        groups: Prompts of a step.
        size: Of the model.
        vocabulary: Words of the model.
    """

    prompt: int
    reply: int
    context: int = 0
    turns: int = 1
    group: int = 8
    groups: int = 8
    size: str = "1.7m"
    vocabulary: int = 320

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.group * self.groups

    @property
    def length(self) -> int:
        """Tokens of a whole episode."""
        return self.prompt + self.reply + (self.turns - 1) * (self.context + self.reply)

    def question(self, index: int) -> str:
        """Returns the words of a prompt."""
        return self._words(self.prompt - AROUND_FIRST, index, 0)

    def feedback(self, index: int, turn: int) -> str:
        """Returns the words that the world adds before a later turn, the same for all siblings."""
        return self._words(self.context - AROUND_NEXT, index, turn)

    def _words(self, count: int, index: int, turn: int) -> str:
        rng = random.Random(1000 * index + turn)
        return " ".join(f"w{rng.randrange(len(MARKS), self.vocabulary)}" for _ in range(count))


def reward_of(text: str) -> float:
    """Returns the share of a reply's words that are even: a reward that differs within every group."""
    words = [word for word in text.split() if word.startswith("w")]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def make_model(folder: Path, shape: Shape) -> Path:
    """Writes a Qwen2 of random weights, and its tokenizer below it, and returns the folder.

    In the model's own folder transformers would take any tokenizer of a Qwen2 for Qwen's.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = _make_tokenizer(shape.vocabulary)
    config = Qwen2Config(
        **SIZES[shape.size],
        num_key_value_heads=2,
        vocab_size=shape.vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder / TOKENIZER)
    return folder


def _make_tokenizer(vocabulary: int) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(MARKS)}
    words |= {f"w{index}": index for index in range(len(MARKS), vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token=MARKS[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # puts a space between words
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=NEVER, pad_token=NEVER, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
