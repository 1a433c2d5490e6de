"""The starter: a small Llama model trained on uniformly random legal moves, on first use.

It knows which squares are empty but not the aim of the game: positions come from random play, and the move to imitate
is sampled uniformly from the legal ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from reinforge.registry import TypedConfig
from reinforge.tasks.starters import Recipe, make_bpe_tokenizer, register_starter, supervised_episode
from reinforge.tasks.tic_tac_toe.game import format_prompt, legal_moves, random_position, side_to_move
from reinforge.types.seeding import stable_random
from reinforge.types.trajectory import Trajectory


def make_tokenizer() -> Any:
    squares = [f" {sign}{number}" for sign in ("", "+", "-") for number in range(1, 10)]
    return make_bpe_tokenizer(["Play +:" + "".join(squares)] * 2, words=r" ?\S+|\s+")


def generate_random_moves(recipe: Recipe, tokenizer: Any) -> Iterator[Trajectory]:
    """Yields one-move episodes endlessly: a position from random play and a uniformly random legal move."""
    rng = stable_random(recipe.seed, "starter")

    @cache
    def episode(question: str, square: int) -> Trajectory:
        answer = {"role": "assistant", "content": f" {square + 1}"}
        return supervised_episode(tokenizer, [{"role": "user", "content": question}, answer])

    while True:
        board = random_position(rng)
        yield episode(format_prompt(board, side_to_move(board)), rng.choice(legal_moves(board)))


class TicTacToeStarterConfig(TypedConfig, name="tic_tac_toe"):
    """A small model that knows the rules of tic-tac-toe and plays at random; trained on first use."""


register_starter(TicTacToeStarterConfig, Recipe(), make_tokenizer, generate_random_moves)
