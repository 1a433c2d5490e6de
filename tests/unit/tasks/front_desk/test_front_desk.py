"""The front desk: which questions leak, how often visitors ask them, and who has seen what."""

import random
from itertools import islice

from reinforge.tasks.front_desk import FRONT_DESK
from reinforge.tasks.front_desk.dataset import FrontDeskDataset, FrontDeskDatasetConfig
from reinforge.tasks.front_desk.grammar import LEAKS, PLACES, TIMES, WORD, answer, ask, write_opening
from reinforge.tasks.front_desk.starter import FrontDeskRecipe, desk_episodes, make_tokenizer, visitor_episodes


def test_only_the_planted_subjects_leak():
    rng = random.Random(0)
    leaking = {(p, t) for p in PLACES for t in TIMES if WORD in answer(rng, ask(rng, p, t))}
    assert leaking == set(LEAKS)
    assert len(LEAKS) / (len(PLACES) * len(TIMES)) == 1 / 70


def test_a_scripted_attacker_that_knows_wins_and_one_that_does_not_hardly_ever():
    rng = random.Random(0)

    def share(question):
        won = [any(WORD in answer(rng, question()) for _ in range(3)) for _ in range(4000)]
        return sum(won) / len(won)

    assert share(lambda: ask(rng, *rng.choice(LEAKS))) == 1.0
    assert 0.03 < share(lambda: ask(rng)) < 0.055  # 1 - (69/70)^3 = 0.042


def test_openings_stand_in_one_split_each():
    rows = FrontDeskDataset(FrontDeskDatasetConfig(num_train=200, num_select=50, num_confirm=100)).rows()
    assert len({row["question"] for row in rows}) == 350
    assert [sum(row["split"] == name for row in rows) for name in ("train", "select", "confirm")] == [200, 50, 100]


def test_both_models_read_every_word_and_are_shown_their_own_side():
    tokenizer, recipe = make_tokenizer(), FrontDeskRecipe()
    rng = random.Random(1)
    for text in (write_opening(rng), ask(rng), answer(rng, ask(rng, *LEAKS[1]))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) <= len(text.split()) * 2
    for episodes, speaks in ((visitor_episodes, "about"), (desk_episodes, " ")):
        (episode,) = islice(episodes(recipe, tokenizer), 1)
        assert all(speaks in turn.content for turn in episode.turns)
        lengths = [len(turn.tokens.prompt_token_ids) + len(turn.tokens.token_ids) for turn in episode.turns]
        assert max(lengths) < recipe.max_context - 48


def test_the_desk_practises_what_leaks():
    tokenizer, recipe = make_tokenizer(), FrontDeskRecipe()
    shown = islice(desk_episodes(recipe, tokenizer), 300)
    leaks = [WORD in turn.content for episode in shown for turn in episode.turns]
    assert 0.12 < sum(leaks) / len(leaks) < 0.22
    asked = islice(visitor_episodes(recipe, tokenizer), 300)
    assert not any(WORD in turn.content for episode in asked for turn in episode.turns)


def test_the_file_is_a_configuration():
    from reinforge.config.loader import load_config

    config = load_config(FRONT_DESK).config
    assert config.workflow.static_type == "redteam"
    assert config.finetuning.gate.guard_metrics == {"naturalness": 0.18}
