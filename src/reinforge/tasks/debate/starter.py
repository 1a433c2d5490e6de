"""The debaters as they begin: they know the rules and which way is theirs, and no more.

As a prover it shows the better of two cells that it looks at: the higher where it argues for reject, else the lower. As
a verifier it goes by what it is shown, but for one decision in ten: against the claim where a cell refutes it, and else
for it.
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

from reinforge.tasks.debate.cells import DIGITS, LIMIT, NAMES, Cells, draw_cells
from reinforge.tasks.debate.prompts import HINT, PROVER, VERIFIER
from reinforge.tasks.starters import Progress, Recipe, Starter, ensure, make_bpe_tokenizer, supervised_episode
from reinforge.types.request import Message
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory

WORDS = r"[a-h]\d| ?[A-Za-z_]+:?|\d|[^A-Za-z\d]"
STANCES = ("accept", "reject")
ANOTHER = "another"


@dataclass(frozen=True, slots=True)
class DebateRecipe(Recipe):
    """The starter's recipe.

    Attributes:
        errs: Share of a verifier's decisions that are the wrong way round.
    """

    num_steps: int = 600
    batch_size: int = 64
    learning_rate: float = 3e-3
    errs: float = 0.1


def ensure_debater(progress: Progress | None = None, recipe: DebateRecipe | None = None) -> Path:
    """Returns the starter's folder; makes it if it is not there, which takes three minutes on two cores."""
    recipe = recipe or DebateRecipe()
    return ensure(Starter("debate", recipe, make_tokenizer, partial(episodes, recipe)), progress)


def make_tokenizer() -> Any:
    """Returns a tokenizer that makes each word and each cell of the debate one token."""
    rng, texts = stable_random(0, "debate", "tokenizer"), list[str]()
    for _ in range(3000):
        cells = draw_cells(rng)
        texts += [message["content"] for message in (*prover_says(rng, cells), *verifier_says(rng, cells))]
    return make_bpe_tokenizer(texts, words=WORDS, vocab_size=600)


def episodes(recipe: DebateRecipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields turns of provers and verifiers, half of each; what they say is supervised."""
    rng = stable_random(recipe.seed, "debate", "starter")
    while True:
        cells = draw_cells(rng)
        says = prover_says(rng, cells) if rng.random() < 0.5 else verifier_says(rng, cells, recipe.errs)
        yield supervised_episode(tokenizer, says)


def prover_says(rng: random.Random, cells: Cells) -> list[Message]:
    """Returns a prover's prompt and the cell that it shows, then another and so on: more to learn from."""
    cells = Cells(tuple(rng.choice(DIGITS) for _ in NAMES), cells.seen)  # any digits, so that it can show them all
    stance, hidden = rng.choice(STANCES), set(range(len(NAMES)))
    prompt = Template(PROVER).substitute(cells.row(), stance=stance)
    messages: list[Message] = []
    for asked in (prompt, *[ANOTHER] * 5):
        pair = sorted(rng.sample(sorted(hidden), 2), key=lambda i: cells.digits[i])
        index = pair[-1] if stance == "reject" else pair[0]
        hidden.remove(index)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": _evidence(cells, index)}]
    return messages


def verifier_says(rng: random.Random, cells: Cells, errs: float = 0.5) -> list[Message]:
    """Returns what a verifier is shown, and its decision; a third have nobody who shows anything.

    Args:
        rng: Where chance comes from.
        cells: The problem.
        errs: Share of decisions that are the wrong way round.
    """
    lines, shown = [Template(VERIFIER).substitute(cells.row())], [cells.digits[i] for i in cells.seen]
    if rng.random() < 2 / 3:
        picked = [rng.randrange(len(NAMES)) for _ in STANCES]
        shown += [cells.digits[i] for i in picked]
        lines += [f"prover_{s}: {_evidence(cells, i)}" for s, i in zip(STANCES, picked, strict=True)]
    decision = "reject" if (max(shown) >= LIMIT) != (rng.random() < errs) else "accept"
    return [{"role": "user", "content": "\n".join((*lines, HINT))}, {"role": "assistant", "content": decision}]


def _evidence(cells: Cells, index: int) -> str:
    """Returns a cell as a prover shows it."""
    return f"{NAMES[index]}{cells.digits[index]}"
