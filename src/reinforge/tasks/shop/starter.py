"""The starter: a small Llama model trained on dialogues of careless clerks, on first use.

Its chat template writes tool calls as Qwen2.5 and Hermes models do:

    <|assistant|><tool_call>{"name": "lookup", "arguments": {"item": "lamp"}}</tool_call><|end|>
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.shop.questions import SYSTEM, TOOLS, Habits, write_dialogue, write_question
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r"[0-9]| ?[A-Za-z_]+|[^A-Za-z0-9_\s]+|\s"
NUM_TOKENIZER_DIALOGUES = 2000

CHAT_TEMPLATE = (
    "{% if tools %}<|system|>Tools:"
    "{% for tool in tools %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|user|><tool_response>{{ message.content }}</tool_response><|end|>"
    "{% else %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ClerkRecipe(Recipe):
    max_model_len: int = 256
    num_steps: int = 500
    batch_size: int = 32
    habits: Habits = field(default_factory=Habits)


def make_tokenizer() -> Any:
    """Returns a tokenizer with one token per word and per digit that can encode any text."""
    rng = stable_random(0, "shop", "tokenizer")
    texts = [SYSTEM, str(TOOLS)]
    for _ in range(NUM_TOKENIZER_DIALOGUES):
        texts += [str(message) for message in write_dialogue(rng, write_question(rng), Habits())]
    texts += ['<tool_call>{"name": "lookup", "arguments": {"item": "}}</tool_call><tool_response></tool_response>'] * 9
    tokenizer = make_bpe_tokenizer(texts, words=WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def generate_careless_clerks(recipe: ClerkRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields dialogues endlessly; every reply of the clerk is supervised."""
    rng = stable_random(recipe.seed, "shop", "starter")
    while True:
        yield supervised_episode(tokenizer, write_dialogue(rng, write_question(rng), recipe.habits), TOOLS)


class ShopStarterConfig(TypedConfig, name="shop"):
    """A small model that answers questions about prices with two tools, carelessly; trained on first use."""


register_starter(ShopStarterConfig, ClerkRecipe(), make_tokenizer, generate_careless_clerks)
