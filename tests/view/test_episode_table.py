"""The list of a run's episodes: filters, orders, groups, and what is read when the run goes on."""

import json
import shutil
import sqlite3
from dataclasses import replace

import pytest

from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.reader import JournalReader
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.trajectory import Outcome
from reinforge.view.episode_table import COLUMNS, EpisodeQuery, EpisodeTable
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


def say(journal, number, question, reply, expected="42", **fields):
    """Records an episode in which the agent asks a model once."""
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": question}]
    answered = ModelReply(
        {"role": "assistant", "content": reply}, "stop", None, 9, len(reply), worker=fields.pop("worker", "")
    )
    call = ModelCall(f"c{number}", fields.pop("llm", "policy"), "m", ModelRequest(messages), answered, (), 0.0, 1.0)
    item = examples(1)[0].copy_with_updates(output_obj=reply, expected_output_obj=expected)
    scores = {
        "right": EvalOutputItem(id="q", score=fields.get("reward", 0.0), reasoning=None),
        "short": EvalOutputItem(id="q", score=None, reasoning=None, error="?"),
    }
    key = EpisodeKey("collect", 0, f"q{number}", 0)
    journal.record_episode(EpisodeRecord(key, item, calls=[call], scores=scores, wall_s=1.5 * number, **fields))


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
    assert keys(table, order="-when") == keys(table)[::-1]
    assert (len(table), table.outcomes, table.phases) == (5, {"ok": 4, "timeout": 1}, {"validate": 1, "collect": 4})


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"phase": "validate"}, ["validate/-1/0/a/0"]),
        ({"epoch": -1}, ["validate/-1/0/a/0"]),
        ({"outcome": "timeout"}, ["collect/0/0/b/1"]),
        ({"outcome": "failed"}, ["collect/0/0/b/1"]),
        ({"text": "B"}, ["collect/0/0/b/0", "collect/0/0/b/1"]),
        ({"phase": "collect", "order": "-reward"}, [f"collect/0/0/{each}" for each in ("a/1", "b/0", "a/0", "b/1")]),
        ({"phase": "collect", "order": "reward"}, [f"collect/0/0/{each}" for each in ("a/0", "b/0", "a/1", "b/1")]),
        ({"order": "-relative", "text": "A"}, ["collect/0/0/a/1", "collect/0/0/a/0", "validate/-1/0/a/0"]),
        ({"order": "relative", "example": "a"}, ["collect/0/0/a/0", "collect/0/0/a/1", "validate/-1/0/a/0"]),
        ({"epoch": 7}, []),
        ({"low": 0.5}, ["collect/0/0/a/1", "collect/0/0/b/0"]),
        ({"low": 0.25, "high": 0.5}, ["validate/-1/0/a/0", "collect/0/0/b/0"]),
    ],
)
def test_filters_and_orders_put_what_is_missing_last(table, query, found):
    assert keys(table, **query) == found


def test_a_reward_is_compared_with_the_mean_of_its_group(table):
    rows = {row[0]: row[4:6] for row in table.build_rows(table.select(EpisodeQuery()))}
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
    [row] = table.build_rows(table.select(EpisodeQuery(order="-when"))[:1])
    assert len(row) == 1 + len(COLUMNS)
    assert row[0] == "collect/0/0/a\x1b[31m\u202e/0"
    assert (row[1], row[-1]) == ("example a\\x1b[31m\\u202e", "a\\x1b[31m\\u202e #0")


def test_a_row_shows_what_was_asked_answered_and_expected(journal):
    say(journal, 2, "What is 6 × 7?", "It is 41.\nOr so.", reward=0.25)
    journal.flush()
    table = EpisodeTable(journal.folder)
    table.update()
    [row] = table.build_rows(table.select(EpisodeQuery()))
    assert dict(zip(COLUMNS, row[1:], strict=True)) == {
        "question": "What is 6 × 7?",
        "reply": "It is 41. Or so.",
        "expected": "42",
        "reward": "0.25",
        "relative": "+0",
        "evaluators": "right 0.25, short -",
        "outcome": "ok",
        "when": "train 0",
        "turns": "1",
        "tokens": "16",
        "time": "3.00",
        "example": "q2 #0",
    }


def test_text_is_searched_in_question_reply_and_expected_answer_and_every_column_sorts(journal):
    say(journal, 1, "Capital of France?", "Paris", "paris", reward=1.0, worker="worker 1")
    say(journal, 2, "Capital of Peru?", "No idea at all", "Lima", llm="judge", worker="worker 2")
    say(journal, 3, "Zebra or PARIS?", "", "x", reward=0.5)
    journal.flush()
    table = EpisodeTable(journal.folder)
    table.update()

    def found(**query):
        return [episode.example_id for episode in table.select(EpisodeQuery(**query))]

    assert found(text="pARis") == ["q1", "q3"]
    assert (found(text="lima"), found(text="Be terse"), found(text="q2")) == (["q2"], [], ["q2"])
    assert (found(agent="judge"), sorted(table.agents)) == (["q2"], ["judge", "policy"])
    assert (found(worker="worker 1"), sorted(table.workers)) == (["q1"], ["worker 1", "worker 2"])
    assert found(order="question") == ["q1", "q2", "q3"]
    assert found(order="-question") == ["q3", "q2", "q1"]
    assert found(order="reply") == ["q2", "q1", "q3"], "an empty reply comes last"
    assert found(order="-tokens") == ["q2", "q1", "q3"]
    assert found(order="time") == ["q1", "q2", "q3"]
    assert all(len(found(order=sign + column)) == 3 for column in COLUMNS for sign in ("", "-"))


def test_a_damaged_episode_is_a_row_without_excerpt(table, journal):
    say(journal, 1, "Capital of France?", "Paris")
    journal.flush()
    with sqlite3.connect(journal.database) as database:
        database.execute("UPDATE episodes SET data = '[1]' WHERE example_id = 'a'")
    database.close()
    table.update()
    assert keys(table, text="Paris") == ["collect/0/0/q1/0"]
    assert {row[1] for row in table.build_rows(table.select(EpisodeQuery(example="a")))} == {"example a"}


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
    assert keys(table, order="-when")[0] == "collect/1/0/a/0"
    assert len(table) == 6


def test_an_episode_that_was_replaced_is_listed_once(table, journal):
    record(journal, "collect", 0, "b", 1, 1.0)
    journal.flush()
    table.update()
    assert (len(table), table.outcomes) == (5, {"ok": 5})
    assert table.build_rows([table.find("collect/0/0/b/1")])[0][4:6] == ["1", "+0.25"]


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
    [
        ({"order": "random"}, 'order: found "random", expected one of question, '),
        ({"epoch": "x"}, 'epoch: found "x", expected a whole number or baseline'),
        ({"low": "much"}, 'low: found "much", expected a number'),
    ],
)
def test_an_address_with_another_value_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        EpisodeQuery.parse(given)


def test_an_address_says_the_query_and_nothing_else():
    query = EpisodeQuery("6 & 7", "collect", -1, "ok", 0.1, 1.0, "a&b", "judge", "-reward")
    assert EpisodeQuery.parse(query.as_dict()) == query
    assert query.as_dict()["epoch"] == "baseline"
    assert EpisodeQuery.parse({"epoch": "-1"}) == replace(EpisodeQuery(), epoch=-1)
    assert EpisodeQuery().as_dict() == {}
    assert json.dumps(EpisodeQuery.parse({"epoch": "3"}).as_dict()) == '{"epoch": "3"}'
