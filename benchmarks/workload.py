"""Synthetic models and prompts whose token counts are exact: every token is one text word.

A reply's text in the next turn's prompt tokenizes to the sampled tokens, so histories extend token by token under any
chat template. The end-of-sequence token is outside the vocabulary: no model has a logit for it, so every reply has its
full length without any setting.
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
"""Marks that the template puts around a user message: <user> <end> <assistant>, later also the reply's <end>."""

SIZES = {
    "1.7m": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "13m": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
    "135m": {
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
        "num_key_value_heads": 3,
    },
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
"""Qwen2 models of 1.64 and 12.7 million parameters with a vocabulary of 320, and of the shapes of SmolLM2-135M and
Qwen2.5-0.5B and 1.5B."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The amount of work in one training step.

    Attributes:
        prompt: Tokens of the first prompt.
        reply: Tokens of each reply.
        context: Tokens that each later turn adds before its reply.
        turns: Replies per episode.
        group: Episodes per prompt.
        groups: Prompts per step.
        size: Size of the model.
        vocabulary: Tokens of the vocabulary.
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
        """Episodes per step."""
        return self.group * self.groups

    @property
    def length(self) -> int:
        """Tokens of a whole episode."""
        return self.prompt + self.reply + (self.turns - 1) * (self.context + self.reply)

    def question(self, index: int) -> str:
        """Returns the text of a prompt."""
        return self._make_text(self.prompt - AROUND_FIRST, index, 0)

    def feedback(self, index: int, turn: int) -> str:
        """Returns the text that the environment adds before a later turn, the same for all siblings."""
        return self._make_text(self.context - AROUND_NEXT, index, turn)

    def reward(self, text: str) -> float:
        """Returns the reward of a reply."""
        return compute_reward(text)

    def find_tokenizer(self, folder: Path) -> Path:
        """Returns the folder of the tokenizer of a model's folder."""
        return folder / TOKENIZER

    def _make_text(self, count: int, index: int, turn: int) -> str:
        rng = random.Random(1000 * index + turn)
        return " ".join(f"w{rng.randrange(len(MARKS), self.vocabulary)}" for _ in range(count))


def compute_reward(text: str) -> float:
    """Returns the share of even tokens in a reply: a reward that differs within every group."""
    tokens = [token for token in text.split() if token.startswith("w")]
    return sum(int(token[1:]) % 2 == 0 for token in tokens) / max(1, len(tokens))


def make_model(folder: Path, shape: Shape) -> Path:
    """Writes a Qwen2 with random weights, and its tokenizer in a subfolder, and returns the folder.

    Next to a Qwen2 model, transformers would replace any tokenizer with Qwen's.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = make_tokenizer(shape.vocabulary)
    config = Qwen2Config(
        **{"num_key_value_heads": 2, **SIZES[shape.size]},
        vocab_size=shape.vocabulary,
        max_position_embeddings=max(1024, shape.length),
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


def make_tokenizer(vocabulary: int) -> Any:
    """Returns a tokenizer of so many words, marks included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate(MARKS)}
    ids |= {f"w{index}": index for index in range(len(MARKS), vocabulary)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=MARKS[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # puts a space between tokens
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=NEVER, pad_token=NEVER, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
