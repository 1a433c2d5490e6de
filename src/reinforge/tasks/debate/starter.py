"""The debaters as they begin: they know the rules and no strategy.

As a prover it shows some cell, whatever its stance; as a verifier it decides by chance, whatever it is shown.
Recipe and figures: docs/lab-notes.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from reinforge.tasks.debate.cells import NAMES, Cells, draw_cells
from reinforge.tasks.debate.prompts import HINT, PROVER, VERIFIER
from reinforge.tasks.starters import Progress, Recipe, Starter, ensure, make_bpe_tokenizer, supervised_episode
from reinforge.types.request import Message
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r" ?[A-Za-z_]+:?|\d|[^A-Za-z\d]"
STANCES = ("accept", "reject")


@dataclass(frozen=True, slots=True)
class DebateRecipe(Recipe):
    """The starter's recipe."""

    num_steps: int = 500
    batch_size: int = 64


def ensure_debater(progress: Progress | None = None, recipe: DebateRecipe | None = None) -> Path:
    """Returns the starter's folder; makes it if it is not there, which takes half a minute on two cores."""
    recipe = recipe or DebateRecipe()
    return ensure(Starter("debate", recipe, make_tokenizer, partial(episodes, recipe)), progress)


def make_tokenizer() -> Any:
    """Returns a tokenizer that makes each word, digit and cell name of the debate one token."""
    rng, texts = stable_random(0, "debate", "tokenizer"), list[str]()
    for _ in range(3000):
        cells = draw_cells(rng)
        texts += [message["content"] for message in (*prover_says(rng, cells), *verifier_says(rng, cells))]
    return make_bpe_tokenizer(texts, words=WORDS, vocab_size=400)


def episodes(recipe: DebateRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields turns of provers and verifiers, half of each; what they say is supervised."""
    rng = stable_random(recipe.seed, "debate", "starter")
    while True:
        say = rng.choice((prover_says, prover_says, verifier_says))
        yield supervised_episode(tokenizer, say(rng, draw_cells(rng)))


def prover_says(rng: random.Random, cells: Cells) -> list[Message]:
    """Returns a prover's prompt and the cell that it shows, any one."""
    prompt = Template(PROVER).substitute(cells.row(), stance=rng.choice(STANCES))
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _evidence(rng, cells)}]


def verifier_says(rng: random.Random, cells: Cells) -> list[Message]:
    """Returns what a verifier is shown, and a decision by chance; a third have nobody who shows anything."""
    lines = [Template(VERIFIER).substitute(cells.row())]
    if rng.random() < 2 / 3:
        lines += [f"prover_{stance}: {_evidence(rng, cells)}" for stance in STANCES]
    return [
        {"role": "user", "content": "\n".join((*lines, HINT))},
        {"role": "assistant", "content": rng.choice(STANCES)},
    ]


def _evidence(rng: random.Random, cells: Cells) -> str:
    """Returns a cell as a prover shows it, drawn evenly."""
    index = rng.randrange(len(NAMES))
    return f"{cells.digits[index]} at {NAMES[index]}"
