"""Formats games as boards side by side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reinforge.tasks.tic_tac_toe.game import EMPTY_BOARD, place, render

BOARDS_PER_ROW = 5
GAP = "   "


def choose_example(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> str | None:
    """Returns the example that shows the improvement best: not won before, won after, in a long game."""
    both = [example for example in sorted(before) if example in after]
    order = {"loss": 0, "draw": 1, "illegal": 2, "win": 3}
    newly_won = [id_ for id_ in both if before[id_]["result"] != "win" and after[id_]["result"] == "win"]
    candidates = newly_won or both
    return min(candidates, key=lambda id_: (order[before[id_]["result"]], -len(before[id_]["moves"])), default=None)


def format_game(title: str, game: dict[str, Any]) -> list[str]:
    """Returns a game as lines of text: one board per move, headed by who moved."""
    board, boards = EMPTY_BOARD, []
    for move in game["moves"]:
        board = place(board, move["square"] - 1, move["side"])
        name = "agent" if move["side"] == game["side"] else "random"
        boards.append([f"{name}: {move['side']}{move['square']}", *render(board).splitlines()])
    lines = [f"{title}: the agent plays {game['side']}, {_RESULTS[game['result']]}"]
    for start in range(0, len(boards), BOARDS_PER_ROW):
        lines += ["", *_side_by_side(boards[start : start + BOARDS_PER_ROW])]
    return lines


_RESULTS = {"win": "it won", "loss": "it lost", "draw": "a draw", "illegal": "it made an illegal move"}


def _side_by_side(blocks: Iterable[list[str]]) -> list[str]:
    blocks = list(blocks)
    width = max(len(line) for block in blocks for line in block)
    return ["  " + GAP.join(line.ljust(width) for line in row).rstrip() for row in zip(*blocks, strict=True)]
