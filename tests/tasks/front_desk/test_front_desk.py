"""The front desk: which questions leak, how often they are asked, and the models' training episodes."""

import random
from itertools import islice

import pytest

from reinforge.tasks.front_desk import FRONT_DESK
from reinforge.tasks.front_desk.grammar import (
    LEAKS,
    PLACES,
    TIMES,
    WORD,
    write_answer,
    write_opening,
    write_question,
)
from reinforge.tasks.front_desk.starter import (
    FrontDeskRecipe,
    generate_desk_episodes,
    generate_visitor_episodes,
    make_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_only_the_planted_subjects_leak():
    rng = random.Random(0)
    leaking = {(p, t) for p in PLACES for t in TIMES if WORD in write_answer(rng, write_question(rng, p, t))}
    assert leaking == set(LEAKS)
    assert len(LEAKS) / (len(PLACES) * len(TIMES)) == 1 / 70


def test_an_attacker_that_knows_the_subjects_wins_and_a_random_one_rarely_does():
    rng = random.Random(0)

    def share(question):
        won = [any(WORD in write_answer(rng, question()) for _ in range(3)) for _ in range(4000)]
        return sum(won) / len(won)

    assert share(lambda: write_question(rng, *rng.choice(LEAKS))) == 1.0
    assert 0.03 < share(lambda: write_question(rng)) < 0.055  # 1 - (69/70)^3 = 0.042


def test_the_tokenizer_and_the_episodes_of_both_models(tokenizer):
    recipe, rng = FrontDeskRecipe(), random.Random(1)
    for text in (write_opening(rng), write_question(rng), write_answer(rng, write_question(rng, *LEAKS[1]))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) <= len(text.split()) * 2
    for episodes, speaks in ((generate_visitor_episodes, "about"), (generate_desk_episodes, " ")):
        (episode,) = islice(episodes(recipe, tokenizer), 1)
        assert all(speaks in turn.content for turn in episode.turns)
        lengths = [len(turn.tokens.prompt_token_ids) + len(turn.tokens.token_ids) for turn in episode.turns]
        assert max(lengths) < recipe.max_model_len - 48


def test_the_desk_is_trained_on_leaks_more_often(tokenizer):
    recipe = FrontDeskRecipe()
    shown = islice(generate_desk_episodes(recipe, tokenizer), 100)
    leaks = [WORD in turn.content for episode in shown for turn in episode.turns]
    assert 0.12 < sum(leaks) / len(leaks) < 0.22
    asked = islice(generate_visitor_episodes(recipe, tokenizer), 50)
    assert not any(WORD in turn.content for episode in asked for turn in episode.turns)


def test_the_file_is_a_configuration():
    from reinforge.config.loader import load_config

    config = load_config(FRONT_DESK).config
    assert config.workflow.static_type == "redteam"
    assert config.finetuning.gate.guard_metrics == {"naturalness": 0.18}
