"""The journal: what is recorded is on disk, one process owns the folder, files are whole."""

import json
import sqlite3

import pytest

from reinforge.errors import StorageError
from reinforge.files import append_line, to_json
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.rows import EpochMetrics, PolicyVersion, ValidationRow, choose_best_validation
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import MetricSummary
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
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


def test_stages_and_jobs_are_on_disk_when_the_call_returns(journal):
    journal.record_stage(3, "SELECT", {"kept": {"b", "a"}})
    ref = TrainingJobRef(run_id="r", backend="local")
    journal.record_job(ref, TrainingJobStatus(run_id="r", backend="local", status="completed"), "r/3")
    database = sqlite3.connect(journal.database)
    assert database.execute("SELECT epoch, stage, data FROM stages").fetchall() == [(3, "SELECT", '{"kept":["a","b"]}')]
    assert database.execute("SELECT job_key, status FROM jobs").fetchall() == [("r/3", "completed")]
    database.close()


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


def test_the_jobs_metrics_follow_the_epochs_own():
    row = EpochMetrics(3, 0.5, num_groups=8, job={"loss": 0.25, "policy_version": 4})
    data = row.as_dict()
    assert list(data)[:2] == ["epoch", "avg_reward"]
    assert list(data)[-3:] == ["stage", "loss", "policy_version"]
    assert EpochMetrics.from_dict(json.loads(to_json(data))) == row


def test_metrics_of_another_version_are_kept_and_missing_ones_are_unknown():
    row = EpochMetrics.from_dict({"epoch": 0, "avg_reward": 1.0, "unheard_of": 7})
    assert (row.num_groups, row.job) == (None, {"unheard_of": 7})
    assert row.as_dict()["unheard_of"] == 7


def test_a_validation_comes_back_with_its_summaries():
    summary = MetricSummary("wins", 0.5, 0.4, 0.6, 100, 2)
    row = ValidationRow(1, 0.5, 0.4, 0.6, 100, 2, {"wins": 0.5}, {"wins": summary}, {"ok": 102}, version=2)
    data = json.loads(to_json(row.as_dict()))
    assert list(data) == ["epoch", "avg_reward", "ci_low", "ci_high", "num_examples", "num_unscored", "metrics",
                          "summaries", "outcomes", "error", "version", "checkpoint", "unscored_reason",
                              "num_clusters"]  # fmt: skip
    assert ValidationRow.from_dict(data) == row


def test_what_a_users_validation_adds_is_kept():
    row = ValidationRow.from_dict({"epoch": 2, "avg_reward": 0.5, "metrics": None, "min_reward": 0.1})
    assert (row.metrics, row.num_examples, row.extra) == ({}, None, {"min_reward": 0.1})
    assert row.as_dict()["min_reward"] == 0.1


def test_the_summarys_policy_versions_do_not_name_checkpoints():
    version = PolicyVersion(1, "abc", 4, "checkpoints/step-000001")
    assert version.as_dict() == {"version": 1, "fingerprint": "abc", "num_updates": 4}
    assert PolicyVersion.from_dict(version.as_dict()) == PolicyVersion(1, "abc", 4)


def validation(epoch, reward, **metrics):
    return ValidationRow(epoch, reward, metrics=metrics, version=epoch + 1, checkpoint=f"step-{epoch}")


def test_best_has_the_highest_reward_and_the_earliest_of_equals():
    rows = [validation(-1, 0.4), validation(0, None), validation(2, 0.55), validation(1, 0.55), validation(3, 0.5)]
    assert choose_best_validation(rows).epoch == 1


def test_baseline_can_be_the_best():
    assert choose_best_validation([validation(-1, 0.6), validation(0, 0.5), validation(1, 0.6)]).epoch == -1


def test_unknown_scores_never_win():
    assert choose_best_validation([validation(0, None), validation(1, float("nan"))]) is None
    assert choose_best_validation([]) is None
    assert choose_best_validation([validation(0, None), validation(1, -5.0)]).epoch == 1


def test_the_gate_metric_decides_if_any_validation_has_it():
    rows = [
        validation(0, 0.9, legal=0.1),
        validation(1, 0.5, legal=None),
        validation(2, 0.1, legal=0.8),
        validation(3, 1.0),
    ]
    assert choose_best_validation(rows, "legal").epoch == 2
    assert choose_best_validation(rows, "unheard of").epoch == 3
    assert choose_best_validation(rows).epoch == 3
