"""The rules, and a board as text."""

import random

import pytest

from reinforge.tasks.tic_tac_toe.game import (
    EMPTY_BOARD,
    LINES,
    completing_moves,
    format_prompt,
    is_over,
    legal_moves,
    other,
    parse_move,
    place,
    random_position,
    render,
    side_to_move,
    winner,
)


def board(text):
    return tuple(None if cell == "." else cell for cell in text if cell in "XO.")


def test_every_line_wins_and_nothing_else_does():
    for line in LINES:
        assert winner(tuple("X" if square in line else None for square in range(9))) == "X"
    assert len({tuple(sorted(line)) for line in LINES}) == 8
    assert winner(board("XXO OOX XOX")) is None
    assert winner(EMPTY_BOARD) is None


def test_a_game_is_over_when_won_or_full():
    assert is_over(board("OOO XX. X.."))
    assert is_over(board("XXO OOX XOX"))
    assert not is_over(board("XX. OO. ..."))


def test_completing_moves_by_hand():
    position = board("XX. OO. ..X")
    assert completing_moves(position, "X") == [2]
    assert completing_moves(position, "O") == [5]
    assert completing_moves(board("X.X ... X.X"), "X") == [1, 3, 4, 5, 7]
    assert completing_moves(board("XXO ... ..."), "X") == []


def test_x_begins_and_sides_alternate():
    assert side_to_move(EMPTY_BOARD) == "X"
    assert side_to_move(place(EMPTY_BOARD, 4, "X")) == "O"
    assert (other("X"), other("O")) == ("O", "X")


def test_only_empty_squares_can_be_taken():
    taken = place(EMPTY_BOARD, 4, "X")
    assert taken[4] == "X"
    assert legal_moves(taken) == [0, 1, 2, 3, 5, 6, 7, 8]
    for square in (4, 9, -1):
        with pytest.raises(ValueError, match="not empty"):
            place(taken, square, "O")


def test_a_board_is_rendered_as_three_lines():
    assert render(board("X.O .X. ..O")) == "X . O\n. X .\n. . O"


def test_the_prompt_numbers_empty_squares_and_names_owners_from_the_players_view():
    position = board("X.O .X. ...")
    assert format_prompt(position, "X") == "Play +: +1 2 -3 4 +5 6 7 8 9"
    assert format_prompt(position, "O") == "Play +: -1 2 +3 4 -5 6 7 8 9"


@pytest.mark.parametrize(("text", "square"), [("5", 4), (" 1\n", 0), ("9", 8)])
def test_a_digit_is_a_move(text, square):
    assert parse_move(text) == square


@pytest.mark.parametrize("text", ["", None, "0", "12", "five", "5.", "²", "५", "+5", "\x00", "5 5"])
def test_anything_else_is_none(text):
    assert parse_move(text) is None


def test_random_positions_are_unfinished_and_alternate():
    rng = random.Random(0)
    positions = [random_position(rng) for _ in range(300)]
    assert all(not is_over(p) and p.count("X") - p.count("O") in (0, 1) for p in positions)
    assert {9 - p.count(None) for p in positions} == set(range(9))
