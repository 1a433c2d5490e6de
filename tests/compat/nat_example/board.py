from functools import cache

import numpy as np

LINES = np.array([(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)])
SIGNS = {1: "X", -1: "O", 0: "_"}


def list_moves(board: np.ndarray) -> list[tuple[int, int]]:
    return [(int(row), int(col)) for row, col in np.argwhere(board == 0)]


def find_winner(board: np.ndarray) -> int:
    """1 or -1: three in a line; 0: nobody."""
    sums = board.ravel()[LINES].sum(axis=1)
    return int(np.any(sums == 3)) - int(np.any(sums == -3))


def format_board(board: np.ndarray) -> str:
    rows = [f"{number} {' '.join(SIGNS[int(cell)] for cell in row)}" for number, row in enumerate(board, 1)]
    return "\n".join(["  1 2 3", *rows])


@cache
def solve(cells: tuple[int, ...], turn: int) -> int:
    """The winner under perfect play; 0: a draw."""
    board = np.array(cells)
    if (winner := find_winner(board)) or 0 not in cells:
        return winner
    outcomes = {solve((*cells[:i], turn, *cells[i + 1 :]), -turn) for i, cell in enumerate(cells) if cell == 0}
    return turn * max(turn * outcome for outcome in outcomes)


def value_of(board: np.ndarray, player: int) -> float:
    """0: lost, in 0..1: open, 10 more: a forced win, 15 more: won; as the example's step rewards."""
    counts = board.ravel()[LINES].sum(axis=1) * player
    base = float(1 / (1 + np.exp(-counts.sum() / 5)))
    if winner := find_winner(board):
        return base + 15 if winner == player else 0.0
    outcome = player * solve(tuple(int(cell) for cell in board.ravel()), 1 if board.sum() == 0 else -1)
    return 0.0 if outcome < 0 else base + 10 * outcome
