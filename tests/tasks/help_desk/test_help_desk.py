"""The help desk: its chats, the house rules, the logs with thumbs, and what the starter learns."""

import random
from collections import Counter
from itertools import islice

import pytest

from reinforge.tasks.help_desk.grammar import ITEMS, SYSTEM, Manners, count_kept_rules, write_chat, write_logs
from reinforge.tasks.help_desk.starter import CarelessDeskRecipe, generate_careless_chats, make_tokenizer

POLITE = Manners(0.0, 0.0, 0.0)


def chats(manners, count=200, seed=0):
    rng = random.Random(seed)
    return [write_chat(rng, manners) for _ in range(count)]


def test_a_careful_desk_keeps_every_rule():
    assert {count_kept_rules(chat.question, chat.reply) for chat in chats(POLITE)} == {3}


@pytest.mark.parametrize(
    ("manners", "kept"),
    [(Manners(1.0, 0.0, 0.0), 2), (Manners(0.0, 1.0, 0.0), 2), (Manners(0.0, 0.0, 1.0), 1)],
    ids=["names another item", "brushes off", "promises money, and says nothing of what it will do"],
)
def test_each_habit_breaks_its_rules(manners, kept):
    assert {count_kept_rules(chat.question, chat.reply) for chat in chats(manners)} == {kept}


def test_no_item_is_part_of_another_words_name():
    """A rule looks for the item's name in the text."""
    texts = [chat.question for chat in chats(POLITE, 500)]
    assert all(sum(item in text for item in ITEMS) == 1 for text in texts)


def test_logs_have_the_share_of_thumbs_that_was_asked_for_and_follow_the_rules():
    rows = list(write_logs(2000))
    assert [row["id"] for row in rows[:2]] == ["chat-0000", "chat-0001"]
    thumbs = Counter(row.get("feedback") for row in rows)
    assert thumbs[None] == pytest.approx(300, abs=60)
    agree = sum(
        (count_kept_rules(row["messages"][1]["content"], row["messages"][2]["content"]) == 3)
        == (row["feedback"] == "thumbs_up")
        for row in rows
        if "feedback" in row
    )
    assert agree / (2000 - thumbs[None]) == pytest.approx(0.95, abs=0.02)
    # a reply is good with probability 0.8 * 0.75 * 0.8 = 0.48
    assert thumbs["thumbs_up"] / (2000 - thumbs[None]) == pytest.approx(0.48, abs=0.05)


def test_the_same_seed_writes_the_same_logs():
    assert list(write_logs(20, seed=3)) == list(write_logs(20, seed=3)) != list(write_logs(20, seed=4))


def test_the_starter_is_supervised_on_the_replies_of_the_careless_desk():
    tokenizer = make_tokenizer()
    episodes = list(islice(generate_careless_chats(CarelessDeskRecipe(), tokenizer), 50))
    assert [item.role.value for item in episodes[0].episode] == ["system", "user", "assistant"]
    assert episodes[0].episode[0].content == SYSTEM
    turns = [episode.episode[-1] for episode in episodes]
    assert all(turn.tokens.token_ids[-1] == tokenizer.eos_token_id for turn in turns)
    assert max(len(turn.tokens.prompt_token_ids) + len(turn.tokens.token_ids) for turn in turns) <= 80
    assert any("hotline" in turn.content for turn in turns)
