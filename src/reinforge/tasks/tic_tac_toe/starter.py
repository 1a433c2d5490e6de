"""The starter: a small Llama that has only seen uniformly random legal moves, made on first use.

It knows which squares are empty and nothing of the aim of the game: positions come from random play, the move to
imitate is drawn uniformly from the legal ones. Recipe and figures: docs/lab-notes.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from reinforge.tasks.starters import Progress, Recipe, Starter, ensure, make_bpe_tokenizer, supervised_episode
from reinforge.tasks.tic_tac_toe.game import legal_moves, prompt_for, random_position, to_move
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory


def ensure_starter(progress: Progress | None = None, recipe: Recipe | None = None) -> Path:
    """Returns the starter's folder; makes it if it is not there, which takes half a minute on two cores.

    Args:
        progress: Told how far the supervised job is.
        recipe: Another recipe, for tests; the default is the measured one, in which X and O are told apart.
    """
    recipe = recipe or Recipe()
    return ensure(Starter("tic_tac_toe", recipe, make_tokenizer, partial(random_moves, recipe)), progress)


def make_tokenizer() -> Any:
    """Returns a tokenizer that makes each square of a board one token and can encode any text."""
    squares = [f" {sign}{number}" for sign in ("", "+", "-") for number in range(1, 10)]
    return make_bpe_tokenizer(["Play +:" + "".join(squares)] * 2, words=r" ?\S+|\s+")


def random_moves(recipe: Recipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields one-move episodes without end: a position of random play, answered by a uniformly random legal move."""
    rng = stable_random(recipe.seed, "starter")

    @cache
    def episode(question: str, square: int) -> Trajectory:
        answer = {"role": "assistant", "content": f" {square + 1}"}
        return supervised_episode(tokenizer, [{"role": "user", "content": question}, answer])

    while True:
        board = random_position(rng)
        yield episode(prompt_for(board, to_move(board)), rng.choice(legal_moves(board)))
