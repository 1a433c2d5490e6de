"""Journals of other formats: an older one is upgraded by the next owner, a newer one is refused with a sentence."""

import json
import sqlite3

import pytest

from reinforge.errors import ConfigError, StorageError
from reinforge.runs.journal.journal import RunJournal, upgrade_journal
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.journal.schema import MIGRATIONS, SCHEMA_VERSION
from reinforge.runs.run_folder import read_overview
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from tests.doubles import examples
from tests.journal_rows import FORMAT_1, read_rows

JOB = {"run_id": "r", "backend": "local", "status": "completed"}
VALIDATION = {"avg_reward": 0.25, "metrics": {"wins": 0.25}, "epoch": -1, "version": 0, "checkpoint": None}


def write_format_1(folder, status="running"):
    """Makes a run folder whose journal has format 1: one validation, one episode and one finished job."""
    folder.mkdir(parents=True)
    database = sqlite3.connect(folder / "run.sqlite", isolation_level=None)
    database.executescript(FORMAT_1)
    database.executemany("INSERT INTO run VALUES (?,?)", [("run_id", '"r"'), ("status", json.dumps(status))])
    stage = "INSERT INTO stages (epoch, stage, at_s, data) VALUES (?,?,?,?)"
    database.execute(stage, (-1, "BASELINE", 10.0, json.dumps(VALIDATION)))
    database.execute(stage, (3, "AWAIT", 20.0, "{}"))
    database.execute("INSERT INTO jobs VALUES (?,?,?,?,?,?)", ("r/3", "r", "local", "completed", 1.0, json.dumps(JOB)))
    values = ("collect/3/0/e/0", "collect", 3, 0, "e", 0, 0, "ok", 0.5, '{"calls": []}')
    database.execute("INSERT INTO episodes VALUES (?,?,?,?,?,?,?,?,?,?)", values)
    database.execute("INSERT INTO policy_versions VALUES (1, 'abc', 4, 'checkpoints/step-000001', 5.0)")
    database.close()
    return folder


def test_every_older_format_can_be_upgraded():
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


def test_the_next_owner_upgrades_a_journal_of_format_1(tmp_path):
    folder = write_format_1(tmp_path / "r")
    journal = RunJournal.open(folder)
    assert journal.read_format() == SCHEMA_VERSION
    assert journal.facts() == {"run_id": "r", "status": "running"}
    [job] = journal.jobs()
    assert (job.job_key, job.epoch, job.state, job.ref, job.status.status) == ("r/3", 3, "completed", None, "completed")
    [version] = journal.policy_versions()
    assert (version.version, version.num_updates, version.checkpoint) == (1, 4, "checkpoints/step-000001")
    [validation] = journal.validations()
    assert (validation.epoch, validation.avg_reward, validation.metrics) == (-1, 0.25, {"wins": 0.25})
    assert [row.stage for row in journal.stages()] == ["BASELINE", "AWAIT"]
    assert (journal.sessions(), journal.snapshots(), journal.metrics(before=99)) == ([], [], [])
    assert journal.count_episodes() == 0, "its episodes cannot be replayed"
    assert read_rows(folder, "SELECT key FROM episodes_of_format_1") == [("collect/3/0/e/0",)], "but they are kept"
    journal.record_episode(EpisodeRecord(EpisodeKey("collect", 3, "e"), examples(1)[0], reward=1.0))
    journal.start_session()
    journal.flush()
    assert (journal.count_episodes(), len(journal.sessions())) == (1, 1)
    journal.close()
    assert read_overview(folder).status == "interrupted"


def test_the_upgraded_tables_are_the_tables_of_a_new_journal(tmp_path):
    RunJournal.open(write_format_1(tmp_path / "old")).close()
    RunJournal(tmp_path / "new").close()
    query = "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%format_1%' AND sql IS NOT NULL ORDER BY name"
    assert read_rows(tmp_path / "old", query) == read_rows(tmp_path / "new", query)


def test_an_upgrade_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    folder = write_format_1(tmp_path / "r")
    monkeypatch.setitem(MIGRATIONS, 1, MIGRATIONS[1] + " INSERT INTO nowhere VALUES (1);")
    with pytest.raises(StorageError, match="nowhere"):
        RunJournal.open(folder)
    assert JournalReader(folder).read_format() == 1
    monkeypatch.undo()
    RunJournal.open(folder).close()
    assert JournalReader(folder).read_format() == SCHEMA_VERSION


def test_a_reader_says_how_an_older_journal_is_upgraded(tmp_path):
    folder = write_format_1(tmp_path / "r", status="completed")
    with pytest.raises(
        StorageError, match=f"format 1 of an older reinforge; `reinforge finetune FILE --resume {folder}`"
    ):
        JournalReader(folder).sessions()
    assert JournalReader(folder).facts()["status"] == "completed", "its facts can be read"
    overview = read_overview(folder)
    assert (overview.status, "upgrades it to format 3" in overview.reason) == ("damaged", True)
    upgrade_journal(folder)
    assert read_overview(folder).record is not None


def test_only_older_journals_are_opened_for_an_upgrade(tmp_path):
    RunJournal(tmp_path / "r").close()
    before = (tmp_path / "r" / "run.sqlite").stat().st_mtime_ns
    upgrade_journal(tmp_path / "r")
    assert (tmp_path / "r" / "run.sqlite").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (99, r"has format 99, written by a newer reinforge; this one reads up to 3: upgrade reinforge"),
        (-1, r"has format -1, which this reinforge can neither read nor upgrade: start a new run"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused(tmp_path, found, sentence):
    folder = write_format_1(tmp_path / "r")
    database = sqlite3.connect(folder / "run.sqlite")
    database.execute(f"PRAGMA user_version = {found}")
    database.close()
    with pytest.raises(ConfigError, match=sentence):
        RunJournal.open(folder)
    for read in (JournalReader(folder).facts, JournalReader(folder).count_episodes):
        with pytest.raises(StorageError, match=sentence):
            read()
    assert read_rows(folder, "SELECT count(*) FROM episodes") == [(1,)], "and left alone"
