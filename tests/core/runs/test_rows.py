"""Rows become what their files hold, and come back from it."""

import json

from reinforge.files import to_json
from reinforge.runs.rows import EpochMetrics, PolicyVersion, ValidationRow, choose_best_validation
from reinforge.types.evaluation import MetricSummary


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
