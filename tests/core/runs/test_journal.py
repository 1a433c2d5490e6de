"""The journal: what is recorded is on disk, one process owns the folder, files are whole."""

import json
import sqlite3

import pytest
import zstandard

from reinforge.errors import StorageError
from reinforge.files import append_line, to_json
from reinforge.runs.journal.journal import RunJournal
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import Outcome
from tests.doubles import examples
from tests.journal_rows import read_rows


@pytest.fixture
def journal(tmp_path):
    made = RunJournal(tmp_path / "run")
    yield made
    made.close()


def episode(number, epoch=0, **fields):
    return EpisodeRecord(EpisodeKey("collect", epoch, "0", number), examples(1)[0], reward=0.5, **fields)


def test_the_same_episode_twice_is_one_row(journal):
    journal.record_episode(episode(1, attempt=0))
    journal.record_episode(episode(1, attempt=1))
    journal.flush()
    assert list(read_rows(journal.folder, "SELECT attempt FROM episodes")) == [(1,)]


def test_missing_episodes_are_recorded_with_their_reason(journal):
    journal.record_episode(episode(1, outcome=Outcome.TOOL_ERROR, reason="a tool broke"))
    journal.flush()
    ((outcome, data),) = read_rows(journal.folder, "SELECT outcome, data FROM episodes")
    assert (outcome, json.loads(data)["reason"]) == ("tool_error", "a tool broke")


def test_stages_and_jobs_are_on_disk_when_the_call_returns(journal):
    journal.record_stage(3, "SELECT", {"kept": {"b", "a"}})
    ref = TrainingJobRef(run_id="r", backend="local")
    journal.record_job(ref, TrainingJobStatus(run_id="r", backend="local", status="completed"), "r/3")
    database = sqlite3.connect(journal.database)
    assert database.execute("SELECT epoch, stage, data FROM stages").fetchall() == [(3, "SELECT", '{"kept":["a","b"]}')]
    assert database.execute("SELECT job_key, status FROM jobs").fetchall() == [("r/3", "completed")]
    database.close()


def test_an_epochs_episodes_are_exported(journal):
    journal.record_episode(episode(0, epoch=1))
    journal.record_episode(episode(1, epoch=1))
    journal.record_episode(episode(0, epoch=2))
    path = journal.export_epoch(1)
    lines = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=1 << 20).decode().splitlines()
    assert [json.loads(line)["generation"] for line in lines] == [0, 1]
    assert journal.export_epoch(7) is None


def test_a_journal_that_cannot_be_written_says_so(journal):
    journal._writer.put(lambda db: db.execute("INSERT INTO nowhere VALUES (1)"))
    with pytest.raises(StorageError, match="nowhere"):
        journal.flush()
    with pytest.raises(StorageError):
        journal.record_episode(episode(0))
    journal._writer._error = None  # so that the fixture can close it


def test_json_of_anything(tmp_path):
    append_line(tmp_path / "b.jsonl", {"x": float("nan")})
    assert (tmp_path / "b.jsonl").read_text() == '{"x":null}\n'
    assert to_json({"a": {3, 1}, "b": object}) == f'{{"a":[1,3],"b":"{object}"}}'
