"""The list of a run's episodes: filters, orders, groups, and what is read when the run goes on."""

import json
import shutil
import sqlite3

import pytest

from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.trajectory import Outcome
from reinforge.view.episode_table import HEADER, EpisodeQuery, EpisodeTable
from tests.doubles import examples


@pytest.fixture
def journal(tmp_path):
    made = RunJournal(tmp_path / "r")
    made.start_session()
    yield made
    made.close()


def record(journal, phase, epoch, example, generation, reward, outcome=Outcome.OK):
    key = EpisodeKey(phase, epoch, example, generation)
    journal.record_episode(EpisodeRecord(key, examples(1)[0], outcome=outcome, reward=reward))


@pytest.fixture
def table(journal):
    """Groups of two: `a` with 0 and 1, `b` with 0.5 and a missing one; a validation of `a`."""
    record(journal, "validate", -1, "a", 0, 0.25)
    for generation, reward in enumerate((0.0, 1.0)):
        record(journal, "collect", 0, "a", generation, reward)
    record(journal, "collect", 0, "b", 0, 0.5)
    record(journal, "collect", 0, "b", 1, None, Outcome.TIMEOUT)
    journal.flush()
    made = EpisodeTable(journal.folder)
    made.update()
    return made


def keys(table, **query):
    return [episode.key for episode in table.select(EpisodeQuery(**query))]


def test_it_lists_all_in_the_order_they_ended(table):
    assert keys(table) == [
        "validate/-1/0/a/0",
        "collect/0/0/a/0",
        "collect/0/0/a/1",
        "collect/0/0/b/0",
        "collect/0/0/b/1",
    ]
    assert keys(table, order="newest") == keys(table)[::-1]
    assert (len(table), table.outcomes, table.phases) == (5, {"ok": 4, "timeout": 1}, {"validate": 1, "collect": 4})


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"phase": "validate"}, ["validate/-1/0/a/0"]),
        ({"epoch": -1}, ["validate/-1/0/a/0"]),
        ({"outcome": "timeout"}, ["collect/0/0/b/1"]),
        ({"outcome": "failed"}, ["collect/0/0/b/1"]),
        ({"example": "B"}, ["collect/0/0/b/0", "collect/0/0/b/1"]),
        ({"phase": "collect", "order": "best"}, [f"collect/0/0/{each}" for each in ("a/1", "b/0", "a/0", "b/1")]),
        ({"phase": "collect", "order": "worst"}, [f"collect/0/0/{each}" for each in ("a/0", "b/0", "a/1", "b/1")]),
        ({"order": "above", "example": "a"}, ["collect/0/0/a/1", "collect/0/0/a/0", "validate/-1/0/a/0"]),
        ({"order": "below", "example": "a"}, ["collect/0/0/a/0", "collect/0/0/a/1", "validate/-1/0/a/0"]),
        ({"epoch": 7}, []),
    ],
)
def test_filters_and_orders_put_what_is_missing_last(table, query, found):
    assert keys(table, **query) == found


def test_a_reward_is_compared_with_the_mean_of_its_group(table):
    rows = {row[0]: row[7:] for row in map(table.build_row, table.select(EpisodeQuery()))}
    assert rows == {
        "validate/-1/0/a/0": ["0.25", ""],
        "collect/0/0/a/0": ["0", "-0.5"],
        "collect/0/0/a/1": ["1", "+0.5"],
        "collect/0/0/b/0": ["0.5", "+0"],
        "collect/0/0/b/1": ["", ""],
    }


def test_control_characters_of_an_example_are_visible_in_its_row_and_kept_in_its_key(table, journal):
    record(journal, "collect", 0, "a\x1b[31m\u202e", 0, 1.0)
    journal.flush()
    table.update()
    row = table.build_row(table.select(EpisodeQuery(order="newest"))[0])
    assert len(row) == 1 + len(HEADER)
    assert row[0] == "collect/0/0/a\x1b[31m\u202e/0"
    assert (row[1], row[4]) == ("collect/0/0/a\\x1b[31m\\u202e/0", "a\\x1b[31m\\u202e")


def test_siblings_and_other_times_of_an_example(table):
    episode = table.find("collect/0/0/a/1")
    assert [each.key for each in table.list_siblings(episode)] == ["collect/0/0/a/0", "collect/0/0/a/1"]
    assert [each.key for each in table.list_others(episode)] == ["validate/-1/0/a/0"]
    assert table.find("collect/0/0/z/1") is None


def count_reads(monkeypatch):
    read = []
    monkeypatch.setattr(
        JournalReader,
        "list_episodes",
        lambda self, after=0, real=JournalReader.list_episodes: read.append(after) or real(self, after),
    )
    return read


def test_only_what_was_added_is_read(table, journal, monkeypatch):
    read = count_reads(monkeypatch)
    table.update()
    assert read == []
    record(journal, "collect", 1, "a", 0, 0.75)
    journal.flush()
    table.update()
    assert read == [5]
    assert keys(table, order="newest")[0] == "collect/1/0/a/0"
    assert len(table) == 6


def test_an_episode_that_was_replaced_is_listed_once(table, journal):
    record(journal, "collect", 0, "b", 1, 1.0)
    journal.flush()
    table.update()
    assert (len(table), table.outcomes) == (5, {"ok": 5})
    assert table.build_row(table.find("collect/0/0/b/1"))[7:] == ["1", "+0.25"]


def test_after_a_resume_everything_is_read_again(table, journal):
    """Episodes were removed, and as many others have their numbers now."""
    journal.rewind(-1, forget_jobs=True, forget_episodes=True)
    journal.start_session()
    for generation in range(4):
        record(journal, "collect", 0, "c", generation, 0.5)
    journal.flush()
    table.update()
    assert keys(table, example="a", phase="collect") == []
    assert len(keys(table, example="c")) == 4


def test_a_run_that_was_removed_and_made_again_is_another_run(tmp_path):
    """Of the same name, with as many episodes: `--overwrite`, again and again, while the page is open."""
    table, numbers = None, []
    for reward in (0.25, 0.75):
        made = RunJournal(tmp_path / "r")
        made.start_session()
        for generation in range(3):
            record(made, "collect", 0, "a", generation, reward)
        made.close()
        table = table or EpisodeTable(tmp_path / "r")
        table.update()
        numbers.append([episode.reward for episode in table.select(EpisodeQuery())])
        shutil.rmtree(tmp_path / "r")
    assert numbers == [[0.25] * 3, [0.75] * 3]


def test_what_an_episode_holds_is_not_read(table, journal):
    """A list of 100,000 episodes would be hundreds of megabytes."""
    journal.close()
    with sqlite3.connect(journal.database) as database:
        database.execute("UPDATE episodes SET data = 'no JSON'")
    database.close()
    again = EpisodeTable(journal.folder)
    again.update()
    assert keys(again) == keys(table)


@pytest.mark.parametrize(
    ("given", "problem"),
    [({"order": "random"}, 'order: found "random", expected one of oldest, '), ({"epoch": "x"}, 'epoch: found "x"')],
)
def test_an_address_with_another_value_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        EpisodeQuery.parse(given)


def test_an_address_says_the_query_and_nothing_else():
    query = EpisodeQuery("collect", -1, "ok", "a&b", "worst")
    assert EpisodeQuery.parse(query.as_dict()) == query
    assert EpisodeQuery().as_dict() == {}
    assert json.dumps(EpisodeQuery.parse({"epoch": "3"}).as_dict()) == '{"epoch": "3"}'
