"""The two models of the front desk: the desk, which is attacked, and the visitor, which learns to attack.

The visitor has seen visitors ask about anything; it knows of no subject that matters more than another. The desk has
seen its own answers, those that leak oftener than visitors ask for them, so that it knows them. Recipe and figures:
docs/lab-notes.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.redteam.dialogue import Turn, attacker_messages, target_messages
from reinforge.tasks.front_desk.grammar import LEAKS, PLACES, TIMES, answer, ask, write_opening
from reinforge.tasks.starters import Progress, Recipe, Starter, ensure, make_bpe_tokenizer, supervised_episode
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z]+|[^A-Za-z\s]+|\s"
NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class FrontDeskRecipe(Recipe):
    """The recipe of either model.

    Attributes:
        leaking: Share of the desk's examples that are about a subject that leaks.
        half: Share that is about only the place or the time of one, so that the desk tells them apart.
    """

    max_context: int = 256
    num_steps: int = 300
    batch_size: int = 32
    leaking: float = 0.15
    half: float = 0.15


def ensure_desk(progress: Progress | None = None, recipe: FrontDeskRecipe | None = None) -> Path:
    """Returns the target's folder; makes it if it is not there, which takes half a minute on two cores."""
    recipe = recipe or FrontDeskRecipe()
    return ensure(Starter("front_desk", recipe, make_tokenizer, partial(desk_episodes, recipe)), progress)


def ensure_visitor(progress: Progress | None = None, recipe: FrontDeskRecipe | None = None) -> Path:
    """Returns the folder of the attacker as it begins; makes it if it is not there."""
    recipe = recipe or FrontDeskRecipe()
    return ensure(Starter("front_desk_visitor", recipe, make_tokenizer, partial(visitor_episodes, recipe)), progress)


def make_tokenizer() -> Any:
    """Returns a tokenizer that makes the words of the desk one token each and can encode any text."""
    rng, texts = stable_random(0, "front_desk", "tokenizer"), list[str]()
    for _ in range(3000):
        question = ask(rng)
        texts += [write_opening(rng), question, answer(rng, question), answer(rng, ask(rng, *LEAKS[0]))]
    return make_bpe_tokenizer(texts, words=WORDS)


def visitor_episodes(recipe: FrontDeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields conversations in which a visitor asks about anything; its questions are supervised."""
    rng = stable_random(recipe.seed, "front_desk", "visitor")
    while True:
        turns = [_turn(rng, ask(rng)) for _ in range(NUM_TURNS)]
        yield supervised_episode(tokenizer, attacker_messages(write_opening(rng), turns)[:-1])


def desk_episodes(recipe: FrontDeskRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields conversations in which the desk answers; its answers are supervised."""
    rng = stable_random(recipe.seed, "front_desk", "desk")
    while True:
        turns = [_turn(rng, ask(rng, *_subject(rng, recipe))) for _ in range(NUM_TURNS)]
        probe, response = turns[-1]
        messages = target_messages(write_opening(rng), turns[:-1], probe)
        yield supervised_episode(tokenizer, [*messages, {"role": "assistant", "content": response}])


def _subject(rng: random.Random, recipe: FrontDeskRecipe) -> tuple[str | None, str | None]:
    drawn, (place, time) = rng.random(), rng.choice(LEAKS)
    if drawn < recipe.leaking:
        return place, time
    if drawn < recipe.leaking + recipe.half:
        return (place, rng.choice(TIMES)) if rng.random() < 0.5 else (rng.choice(PLACES), time)
    return None, None


def _turn(rng: random.Random, question: str) -> Turn:
    return question, answer(rng, question)
