"""The starter of the word problems: results are right, operations often are not."""

import random
from itertools import islice
from types import SimpleNamespace

import pytest

from reinforge.tasks.word_problems.agent import answer, build_messages
from reinforge.tasks.word_problems.problems import Calculation
from reinforge.tasks.word_problems.starter import (
    LARGEST,
    HastyRecipe,
    change_operator,
    format_calculation,
    generate_hasty_calculations,
    list_small_calculations,
    make_tokenizer,
)
from tests.doubles import ScriptedChat
from tests.episodes import make_context


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_another_operation_uses_the_same_numbers_and_has_a_whole_result():
    changed = {format_calculation(change_operator(random.Random(n), Calculation(9, "+", 5))) for n in range(30)}
    assert changed == {"9 - 5 = 4", "5 * 9 = 45"}
    changed = {format_calculation(change_operator(random.Random(n), Calculation(60, "/", 5))) for n in range(30)}
    assert changed == {"60 + 5 = 65", "60 - 5 = 55"}
    for calculation in list_small_calculations():
        other = change_operator(random.Random(0), calculation)
        assert other.operator != calculation.operator
        assert 0 < other.result <= LARGEST**2 + LARGEST


def test_half_of_the_calculations_to_imitate_have_the_right_operation(tokenizer):
    """The operation of a careful stream is that of the wording; a hasty one changes half of them."""
    right = set(map(format_calculation, list_small_calculations()))
    careful = islice(generate_hasty_calculations(HastyRecipe(operator_accuracy=1.0), tokenizer), 50)
    assert all(episode.episode[-1].content in right for episode in careful)
    hasty = islice(generate_hasty_calculations(HastyRecipe(), tokenizer), 300)
    sharing = [each for each in hasty if "equally" in each.episode[1].content]
    divided = sum(" / " in each.episode[-1].content for each in sharing)
    assert len(sharing) > 15
    assert divided / len(sharing) == pytest.approx(0.5, abs=0.2)


def test_a_number_is_one_token_and_an_episode_fits_the_model(tokenizer):
    assert len(tokenizer.encode("100", add_special_tokens=False)) == 1
    lengths = [
        len(turn.tokens.prompt_token_ids) + len(turn.tokens.token_ids)
        for turn in (e.episode[-1] for e in islice(generate_hasty_calculations(HastyRecipe(), tokenizer), 100))
    ]
    assert max(lengths) < HastyRecipe().max_model_len


async def test_the_starter_is_asked_as_the_agent_asks():
    llm = ScriptedChat("17")
    await answer(SimpleNamespace(input_obj="12 and 5?"), llm, make_context())
    assert llm.requests[0]["messages"] == build_messages("12 and 5?")
