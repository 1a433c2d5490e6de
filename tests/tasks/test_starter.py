"""The tic-tac-toe starter: tokenizer and training episodes."""

import itertools

import pytest

from reinforge.tasks.starters import Recipe
from reinforge.tasks.tic_tac_toe.game import EMPTY_BOARD, format_prompt, legal_moves
from reinforge.tasks.tic_tac_toe.starter import generate_random_moves, make_tokenizer


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
