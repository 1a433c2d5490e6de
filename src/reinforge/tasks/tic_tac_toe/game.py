"""Tic-tac-toe: the board, its rules, and its text for people and for the model.

    squares 0 1 2     `render`   X . O     `format_prompt(board, "X")`   Play +: +1 2 -3 4 5 6 7 8 9
            3 4 5                . . .     `format_prompt(board, "O")`   Play +: -1 2 +3 4 5 6 7 8 9
            6 7 8                . . .

A board is a tuple of nine entries, `"X"`, `"O"` or `None` for an empty square. Indices in code start at 0, numbers in
text at 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

Side = Literal["X", "O"]
Square = Side | None
Board = tuple[Square, ...]

EMPTY_BOARD: Board = (None,) * 9

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
"""The eight winning lines."""


def other(side: Side) -> Side:
    return "O" if side == "X" else "X"


def legal_moves(board: Sequence[Square]) -> list[int]:
    return [square for square, owner in enumerate(board) if owner is None]


def place(board: Board, square: int, side: Side) -> Board:
    if square not in range(9) or board[square] is not None:
        raise ValueError(f"square {square + 1} is not empty; empty are {[s + 1 for s in legal_moves(board)]}")
    return (*board[:square], side, *board[square + 1 :])


def winner(board: Sequence[Square]) -> Side | None:
    """Returns the side that has a line, or None."""
    for a, b, c in LINES:
        owner = board[a]
        if owner is not None and owner == board[b] == board[c]:
            return owner
    return None


def completing_moves(board: Sequence[Square], side: Side) -> list[int]:
    """Returns the empty squares that would complete a line of `side`, in order."""
    last = [[s for s in line if board[s] is None] for line in LINES if sum(board[s] == side for s in line) == 2]
    return sorted({empty[0] for empty in last if empty})


def is_over(board: Sequence[Square]) -> bool:
    return winner(board) is not None or None not in board


def side_to_move(board: Sequence[Square]) -> Side:
    return "X" if board.count("X") == board.count("O") else "O"


def random_position(rng: random.Random) -> Board:
    """Returns an unfinished board after a random number of random legal moves, 0 to 8, both uniform."""
    while True:
        board = EMPTY_BOARD
        for _ in range(rng.randrange(9)):
            board = place(board, rng.choice(legal_moves(board)), side_to_move(board))
            if is_over(board):
                break
        else:
            return board


def render(board: Sequence[Square]) -> str:
    cells = [owner or "." for owner in board]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def format_prompt(board: Sequence[Square], side: Side) -> str:
    """Returns the model's prompt: the nine squares, marked `+` if they are its own and `-` if the opponent's.

    Both sides have the same view, so what the model learns as X applies to O.
    """
    signs = {None: "", side: "+", other(side): "-"}
    squares = " ".join(f"{signs[owner]}{number}" for number, owner in enumerate(board, start=1))
    return f"Play +: {squares}"


def parse_move(text: str | None) -> int | None:
    """Returns the index of the square in an answer, or None if the answer is not exactly one digit from 1 to 9.

    Example: `parse_move(" 5")` -> 4; `parse_move("12")`, `parse_move("five")` and `parse_move("²")` -> None.
    """
    word = (text or "").strip()
    return int(word) - 1 if len(word) == 1 and word in "123456789" else None
