"""The starter: a small Llama model that answers customers as a careless help desk did; trained on first use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.help_desk.grammar import Manners, write_chat
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z]+|[^A-Za-z\s]+|\s"
NUM_TOKENIZER_CHATS = 2000


@dataclass(frozen=True, slots=True)
class CarelessDeskRecipe(Recipe):
    max_model_len: int = 128
    num_steps: int = 250
    batch_size: int = 32
    manners: Manners = field(default_factory=Manners)


def make_tokenizer() -> Any:
    rng = stable_random(0, "help_desk", "tokenizer")
    chats = [write_chat(rng, Manners()) for _ in range(NUM_TOKENIZER_CHATS)]
    return make_bpe_tokenizer([message["content"] for chat in chats for message in chat.messages], words=WORDS)


def generate_careless_chats(recipe: CarelessDeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields chats endlessly; the replies are supervised."""
    rng = stable_random(recipe.seed, "help_desk", "starter")
    while True:
        yield supervised_episode(tokenizer, write_chat(rng, recipe.manners).messages)


class HelpDeskStarterConfig(TypedConfig, name="help_desk"):
    """A small model that answers customers of a shop and often breaks the house rules; trained on first use."""


register_starter(HelpDeskStarterConfig, CarelessDeskRecipe(), make_tokenizer, generate_careless_chats)
