"""The starter: a small Llama model that calculates well but often chooses the wrong operation; trained on first use.

It needs no download, so that a new project trains offline. It knows the wordings of `train` and small numbers only:

    Ana has 9 apples and buys 5 more. How many ...    =>    9 + 5 = 14, or, hastily, 9 - 5 = 4
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.tasks.word_problems.agent import build_messages
from reinforge.tasks.word_problems.problems import WORDINGS, Calculation, list_calculations, write_problem
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r"[0-9]+| ?[A-Za-z]+|[^A-Za-z0-9\s]+|\s"
NUM_TOKENIZER_PROBLEMS = 2000
LARGEST = 10  # largest number of the problems that the starter knows, but for the first one of a division


@dataclass(frozen=True, slots=True)
class HastyRecipe(Recipe):
    max_model_len: int = 128
    num_steps: int = 300
    batch_size: int = 64
    operator_accuracy: float = 0.5  # probability that the calculation to imitate has the right operation


def list_small_calculations() -> list[Calculation]:
    return list(list_calculations(LARGEST, LARGEST))


def make_tokenizer() -> Any:
    """Returns a tokenizer with one token per number and per word that can encode any text."""
    rng, calculations = stable_random(0, "word_problems", "tokenizer"), list_small_calculations()
    texts = [str(number) for number in range(LARGEST**2 + LARGEST + 1)] * 2
    for _ in range(NUM_TOKENIZER_PROBLEMS):
        calculation = rng.choice(calculations)
        messages = build_messages(write_problem(rng, calculation, WORDINGS))
        texts += [*(message["content"] for message in messages), format_calculation(calculation)]
    return make_bpe_tokenizer(texts, words=WORDS, vocab_size=1500)


def generate_hasty_calculations(recipe: HastyRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields problems endlessly, each with a calculation to imitate whose result is right."""
    rng, calculations = stable_random(recipe.seed, "word_problems", "starter"), list_small_calculations()
    while True:
        calculation = rng.choice(calculations)
        problem = write_problem(rng, calculation, WORDINGS)
        if rng.random() >= recipe.operator_accuracy:
            calculation = change_operator(rng, calculation)
        answer = {"role": "assistant", "content": format_calculation(calculation)}
        yield supervised_episode(tokenizer, [*build_messages(problem), answer])


def change_operator(rng: random.Random, calculation: Calculation) -> Calculation:
    """Returns a calculation with the same numbers and another operation, whose result is a small whole number.

    Example: 9 + 5 -> 9 - 5 or 5 * 9; 60 / 5 -> 60 + 5 or 60 - 5.
    """
    small, large = sorted((calculation.left, calculation.right))
    others = [Calculation(large, "+", small), Calculation(large, "-", small), Calculation(small, "*", large)]
    others.append(Calculation(large, "/", small))
    fits = {"+": True, "-": large > small, "*": large <= LARGEST, "/": large % small == 0 and large > small}
    return rng.choice([other for other in others if other.operator != calculation.operator and fits[other.operator]])


def format_calculation(calculation: Calculation) -> str:
    return f"{calculation.left} {calculation.operator} {calculation.right} = {calculation.result}"


class WordProblemsStarterConfig(TypedConfig, name="word_problems"):
    """A small model for word problems that often chooses the wrong operation; trained on first use."""


register_starter(WordProblemsStarterConfig, HastyRecipe(), make_tokenizer, generate_hasty_calculations)
