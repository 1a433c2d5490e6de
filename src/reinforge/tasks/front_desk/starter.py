"""The two models of the front desk: the desk, which is attacked, and the visitor, which learns to attack.

The visitor is trained on questions about random subjects, so it prefers none of them. The desk is trained on its
answers; leaking ones are more frequent than in the visitors' questions, so that it learns them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reinforge.redteam.turns import Turn, build_attacker_messages, build_target_messages
from reinforge.registry import TypedConfig
from reinforge.tasks.front_desk.grammar import LEAKS, PLACES, TIMES, write_answer, write_opening, write_question
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z]+|[^A-Za-z\s]+|\s"
NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class FrontDeskRecipe(Recipe):
    max_model_len: int = 256
    num_steps: int = 300
    batch_size: int = 32
    leak_rate: float = 0.15  # share of the desk's examples about a leaking subject
    near_miss_rate: float = 0.15
    """Share about only the place or only the time of one, so that the desk learns the difference."""


def make_tokenizer() -> Any:
    """Returns a tokenizer with one token per word of the desk that can encode any text."""
    rng, texts = stable_random(0, "front_desk", "tokenizer"), list[str]()
    for _ in range(3000):
        question = write_question(rng)
        texts += [write_opening(rng), question, write_answer(rng, question)]
        texts.append(write_answer(rng, write_question(rng, *LEAKS[0])))
    return make_bpe_tokenizer(texts, words=WORDS)


def generate_visitor_episodes(recipe: FrontDeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields conversations in which a visitor asks about random subjects; its questions are supervised."""
    rng = stable_random(recipe.seed, "front_desk", "visitor")
    while True:
        turns = [_write_turn(rng, write_question(rng)) for _ in range(NUM_TURNS)]
        yield supervised_episode(tokenizer, build_attacker_messages(write_opening(rng), turns)[:-1])


def generate_desk_episodes(recipe: FrontDeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields conversations in which the desk answers; its answers are supervised."""
    rng = stable_random(recipe.seed, "front_desk", "desk")
    while True:
        turns = [_write_turn(rng, write_question(rng, *_sample_subject(rng, recipe))) for _ in range(NUM_TURNS)]
        probe, response = turns[-1]
        messages = build_target_messages(write_opening(rng), turns[:-1], probe)
        yield supervised_episode(tokenizer, [*messages, {"role": "assistant", "content": response}])


def _sample_subject(rng: random.Random, recipe: FrontDeskRecipe) -> tuple[str | None, str | None]:
    kind, (place, time) = rng.random(), rng.choice(LEAKS)
    if kind < recipe.leak_rate:
        return place, time
    if kind < recipe.leak_rate + recipe.near_miss_rate:
        return (place, rng.choice(TIMES)) if rng.random() < 0.5 else (rng.choice(PLACES), time)
    return None, None


def _write_turn(rng: random.Random, question: str) -> Turn:
    return question, write_answer(rng, question)


class DeskConfig(TypedConfig, name="front_desk"):
    """The front desk, a small model to attack; trained on first use."""


class VisitorConfig(TypedConfig, name="front_desk_visitor"):
    """The visitor, a small model that attacks the front desk; trained on first use."""


register_starter(DeskConfig, FrontDeskRecipe(), make_tokenizer, generate_desk_episodes)
register_starter(VisitorConfig, FrontDeskRecipe(), make_tokenizer, generate_visitor_episodes)
