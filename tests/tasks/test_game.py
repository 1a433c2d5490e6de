"""The rules, and a board as text."""

import itertools
import random

import pytest

from reinforge.registry import REGISTRY
from reinforge.tasks.starters import Recipe
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
from reinforge.tasks.tic_tac_toe.starter import generate_random_moves, make_tokenizer


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


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_each_square_is_one_token(tokenizer):
    for sign in ("", "+", "-"):
        for number in range(1, 10):
            assert len(tokenizer.encode(f" {sign}{number}", add_special_tokens=False)) == 1
    prompt = tokenizer.encode(format_prompt(EMPTY_BOARD, "X"), add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(prompt)[:2] == ["Play", "Ġ+:"]
    assert len(prompt) == 11


def test_the_starter_is_trained_on_uniform_legal_moves(tokenizer):
    first = list(itertools.islice(generate_random_moves(Recipe(), tokenizer), 400))
    for trajectory in first:
        question, answer = trajectory.episode
        empty = [word for word in question.content.split(" ") if len(word) == 1]
        assert answer.content.strip() in empty
        assert tokenizer.decode(answer.tokens.token_ids) == f"{answer.content}<|end|>"
    opening = format_prompt(EMPTY_BOARD, "X")
    answers = [t.episode[1].content for t in first if t.episode[0].content == opening]
    assert len(set(answers)) == len(legal_moves(EMPTY_BOARD))


NAMES = ("cells", "front_desk", "shop", "tic_tac_toe", "tickets", "word_problems")
SIZES = {"train": 60, "select": 20, "confirm": 30}


async def load(name, sizes=SIZES, **settings):
    component = REGISTRY.get("dataset", name)
    config = component.config_type(**{f"num_{split}": size for split, size in sizes.items()}, **settings)
    [loader] = [each async for each in component.factory(config, None)]
    assert (type(loader).__qualname__, type(loader).__module__) == (component.factory.__qualname__, component.origin)
    return loader


@pytest.mark.parametrize("name", NAMES)
async def test_rows_name_their_split_and_none_occurs_twice(name):
    rows = (await load(name, seed=1)).rows()
    assert rows[17]["id"] == "train-00017"
    assert {split: sum(row["split"] == split for row in rows) for split in SIZES} == SIZES
    assert len({row["id"] for row in rows}) == len({row.get("question", row.get("world_seed")) for row in rows}) == 110
    assert rows == (await load(name, seed=1)).rows()
    assert rows != (await load(name, seed=2)).rows()


@pytest.mark.parametrize("name", NAMES)
async def test_an_example_is_a_row(name):
    loader = await load(name)
    for item, row in zip(loader.load(), loader.rows(), strict=True):
        assert (item.id, item.expected_output_obj, item.full_dataset_entry) == (row["id"], row.get("answer"), row)
        assert item.input_obj == row.get("question", {key: row.get(key) for key in ("side", "opponent", "world_seed")})


@pytest.mark.parametrize(("name", "sizes"), [("word_problems", (4000, 400, 1000)), ("shop", (2000, 200, 500))])
async def test_the_largest_dataset_can_be_made(name, sizes):
    loader = await load(name, dict(zip(SIZES, sizes, strict=True)))
    assert len(loader.rows()) == sum(sizes)
