"""Metrics on dashboards: their names, each point once, and a tracker that fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.statistics import Improvement
from reinforge.interfaces import Tracker
from reinforge.runs import tracking as tracked_progress
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import EpochMetrics, ValidationRow
from reinforge.runs.summary import RunSummary
from reinforge.runs.tracking import (
    StepCount,
    TrackedProgress,
    keep_numbers,
    name_epoch_metrics,
    name_results,
    name_validation_metrics,
    read_sent,
)
from reinforge.trackers.packages import require_package
from reinforge.types.evaluation import MetricSummary
from reinforge.types.tracking import TrackedRun
from tests.trackers.trackers import ListTracker, read_mlflow, read_tensorboard, read_trackio, read_wandb


def epoch(number: int, **job: Any) -> EpochMetrics:
    return EpochMetrics(number, avg_reward=0.1 * number, num_groups_kept=2, job={"num_updates": 4, **job})


class Display(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Session:
    def __init__(self, journal: RunJournal, tracker: ListTracker):
        self.journal, self.tracker, self.display, self.now = journal, tracker, Display(), 100.0
        run = TrackedRun("r", journal.folder, "0123456789abcdef")
        self.progress = TrackedProgress(self.display, {"board": tracker}, run, journal, clock=lambda: self.now)

    def finish(self, status: Any = "completed", **results: Any) -> list[tuple[str, int, float]]:
        self.progress.finish(RunSummary("r", status, self.journal.folder, **results))
        return self.tracker.points

    def kill(self) -> None:
        """Lets the points be sent, and ends without closing the run."""
        done = threading.Event()
        self.tracker.fail = lambda what: done.set() if what == "finish" else None
        [sender] = self.progress._senders
        sender.finish("killed", 5)
        assert done.is_set()


@pytest.fixture
def journal(tmp_path):
    made = RunJournal(tmp_path / "r")
    yield made
    made.close()


def test_an_epoch_has_the_names_that_dashboards_know() -> None:
    row = EpochMetrics(
        3,
        avg_reward=0.5,
        ci_low=0.4,
        filtered_avg_reward=0.6,
        num_groups=20,
        num_groups_kept=15,
        num_groups_zero_variance=4,
        num_missing=1,
        curriculum_percentile=1.0,
        reward_std=0.25,
        completion_tokens=12.5,
        clipped_share=0.1,
        scores={"correct": 0.4, "odd name!": 0.2},
        job={
            "loss": -0.1,
            "lr": 1e-3,
            "grad_norm": 2.0,
            "entropy": 0.7,
            "kl_ref": 0.02,
            "clip_fraction": 0.05,
            "mismatch_kl": 1e-6,
            "my_metric": 4,
            "reason": "text",
            "broken": float("nan"),
            "policy_version": None,
        },
    )
    assert name_epoch_metrics(row) == {
        "epoch": 3,
        "reward/mean": 0.5,
        "reward/std": 0.25,
        "reward/kept_mean": 0.6,
        "reward/correct": 0.4,
        "reward/odd name_": 0.2,
        "completions/mean_length": 12.5,
        "completions/clipped_ratio": 0.1,
        "frac_reward_zero_std": 0.2,
        "groups/kept_ratio": 0.75,
        "episodes/missing": 1,
        "curriculum": 1.0,
        "loss": -0.1,
        "learning_rate": 1e-3,
        "grad_norm": 2.0,
        "entropy": 0.7,
        "kl": 0.02,
        "clip_ratio/region_mean": 0.05,
        "mismatch_kl/mean": 1e-6,
        "job/my_metric": 4,
    }
    assert name_epoch_metrics(EpochMetrics(0)) == {"epoch": 0}  # what is not known has no point


def test_validations_and_the_verdict_have_names_of_their_own() -> None:
    row = ValidationRow(3, 0.5, num_unscored=0, metrics={"correct": 0.4, "style": None})
    assert name_validation_metrics(row) == {
        "validation/correct": 0.4,
        "validation/reward": 0.5,
        "validation/unscored": 0,
    }
    summary = RunSummary("r", "completed", Path("r"), promoted=True)
    summary.improvement = Improvement(0.25, 0.1, 0.4, 0.01, 12, "paired")
    summary.confirm_tuned = MetricSummary("correct", 0.75, 0.6, 0.9, 12, 0)
    assert name_results(summary) == {
        "verdict/tuned": 0.75,
        "verdict/improvement": 0.25,
        "verdict/ci_low": 0.1,
        "verdict/ci_high": 0.4,
        "verdict/promoted": 1,
    }
    assert name_results(RunSummary("r", "failed", Path("r"))) == {}
    assert keep_numbers({"a": True, "b": None, "c": "1"}) == {"a": 1.0}


def test_the_x_axis_counts_optimizer_steps() -> None:
    steps = StepCount()
    rows = [epoch(0), EpochMetrics(1), epoch(2), EpochMetrics(3, num_groups_kept=2, job={"loss": 1.0})]
    assert [steps.add(row) for row in rows] == [4, 4, 8, 9]  # nothing trained; a job that reports no steps
    assert steps.add(rows[0]) == 4  # again after a resume
    assert [steps.find(-1), steps.find(2), steps.find(7)] == [0, 8, 9]


def test_points_stages_and_the_verdict_go_out_in_order(journal: RunJournal) -> None:
    session = Session(journal, ListTracker(known={}))
    progress = session.progress
    progress.stage(None, "BASELINE", 4)
    session.now += 2
    progress.validation(ValidationRow(-1, 0.25))
    progress.stage(0, "COLLECT", 8)
    session.now += 3
    progress.stage(0, "AWAIT", None)
    session.now += 5
    progress.epoch_done(epoch(0, loss=1.0))
    improvement = Improvement(0.25, 0.1, 0.4, 0.01, 12, "paired")
    points = session.finish(improvement=improvement, promoted=False)
    assert points == [
        ("validation/reward", 0, 0.25),
        ("time/baseline", 0, 2.0),
        ("epoch", 4, 0.0),
        ("reward/mean", 4, 0.0),
        ("steps/made", 4, 4.0),
        ("loss", 4, 1.0),
        ("time/collect", 4, 3.0),
        ("time/train", 4, 5.0),
        ("verdict/improvement", 4, 0.25),
        ("verdict/ci_low", 4, 0.1),
        ("verdict/ci_high", 4, 0.4),
        ("verdict/promoted", 4, 0.0),
    ]
    assert (session.tracker.statuses, session.display.notes) == (["completed"], [])


def test_a_killed_and_resumed_run_sends_no_point_twice_where_the_run_keeps_the_record(journal: RunJournal) -> None:
    first = Session(journal, ListTracker(known=None))
    first.progress.epoch_done(epoch(0))
    first.progress.epoch_done(epoch(1))
    first.kill()
    assert read_sent(journal)["board"]["epoch"] == 8
    second = Session(journal, ListTracker(known=None))
    second.progress.send_history([epoch(0)], [ValidationRow(-1, 0.2)])  # epoch 1 is trained again
    second.progress.epoch_done(epoch(1))
    second.progress.epoch_done(epoch(2))
    sent = [(name, step) for name, step, _ in [*first.tracker.points, *second.finish()]]
    assert len(sent) == len(set(sent))
    assert [step for name, step in sent if name == "epoch"] == [4, 8, 12]
    assert ("validation/reward", 0) in sent  # which the first process had not come to


def test_without_the_record_points_would_double(journal: RunJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracked_progress, "read_sent", lambda journal: {})
    points = []
    for _ in range(2):
        session = Session(journal, ListTracker(known=None))
        session.progress.epoch_done(epoch(0))
        points += session.finish()
    assert [step for name, step, _ in points if name == "epoch"] == [4, 4]


def test_the_record_is_on_disk_before_the_point_is_sent(journal: RunJournal) -> None:
    tracker = ListTracker(known=None)
    seen = []
    tracker.fail = lambda what: seen.append(read_sent(journal)) if what == "log" else None
    session = Session(journal, tracker)
    session.progress.epoch_done(EpochMetrics(0))
    session.finish()
    assert seen == [{"board": {"epoch": 0}}]


def test_a_dashboard_that_lost_points_gets_them_again(journal: RunJournal) -> None:
    session = Session(journal, ListTracker(known={"epoch": 4}))
    session.progress.send_history([EpochMetrics(0, job={"num_updates": 4}), epoch(1)], [])
    assert [(name, step) for name, step, _ in session.finish()] == [
        ("steps/made", 4),
        ("epoch", 8),
        ("reward/mean", 8),
        ("steps/made", 8),
    ]


@pytest.mark.parametrize("place", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_said_once_and_stops_nothing(journal: RunJournal, place: str) -> None:
    def fail(what: str) -> None:
        if what == place:
            raise OSError("no route to host")

    line = fail.__code__.co_firstlineno + 2

    session = Session(journal, ListTracker(known={}, fail=fail))
    for number in range(3):
        session.progress.stage(number, "COLLECT", 4)
        session.progress.epoch_done(epoch(number))
    session.finish()
    [note] = session.display.notes
    assert note.startswith("tracker board: OSError: no route to host (")
    assert note.endswith(f"test_trackers.py:{line}); training continues, and the run folder has every metric")


def test_a_tracker_that_hangs_holds_up_nothing(journal: RunJournal) -> None:
    hold = threading.Event()
    tracker = ListTracker(known={}, fail=lambda what: hold.wait(30) and None)
    tracker.stop_s = 0.05
    session = Session(journal, tracker)
    session.progress.epoch_done(epoch(0))
    session.finish("stopped")
    hold.set()
    assert session.display.notes == [
        "tracker board: not everything was sent within 0.05 s; the run folder has every metric"
    ]


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(ConfigError) as caught:
        require_package("no_such_package", "wandb")
    assert caught.value.problems[0].message == "the package no_such_package is not installed"
    assert caught.value.problems[0].fix == "pip install 'reinforge[wandb]', or remove this tracker"


def make_real(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name == "tensorboard":
        pytest.importorskip("tensorboardX")
        from reinforge.trackers.tensorboard import TensorBoardConfig, TensorBoardTracker

        return lambda: TensorBoardTracker(TensorBoardConfig()), lambda run: read_tensorboard(run.folder / "tensorboard")
    if name == "mlflow":
        pytest.importorskip("mlflow")
        from reinforge.trackers.mlflow import MLflowConfig, MLflowTracker

        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (tmp_path / "mlruns").as_uri()
        return lambda: MLflowTracker(MLflowConfig(tracking_uri=uri)), lambda run: read_mlflow(uri, run.key)
    if name == "trackio":
        pytest.importorskip("trackio")
        from trackio import sqlite_storage

        from reinforge.trackers.trackio import TrackioConfig, TrackioTracker

        monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
        return lambda: TrackioTracker(TrackioConfig(project="p")), lambda run: read_trackio("p", run.key)
    pytest.importorskip("wandb")
    from reinforge.trackers.wandb import WandbConfig, WandbTracker

    return lambda: WandbTracker(WandbConfig(mode="offline")), lambda run: read_wandb(run.folder / "wandb")


@pytest.mark.parametrize(
    "name", ["tensorboard", "trackio", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mlflow", "wandb"))]
)
def test_each_dashboard_has_every_point_once_after_a_resume(
    name: str, journal: RunJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, read = make_real(name, tmp_path, monkeypatch)
    monkeypatch.setattr(Tracker, "stop_s", 100.0)
    monkeypatch.setattr(Tracker, "finish_s", 100.0)
    first = Session(journal, make())
    first.progress.validation(ValidationRow(-1, 0.25))
    first.progress.epoch_done(epoch(0))
    first.progress.epoch_done(epoch(1))
    first.progress.finish(RunSummary("r", "stopped", journal.folder))
    second = Session(journal, make())
    second.progress.send_history([epoch(0)], [ValidationRow(-1, 0.25)])  # epoch 1 is trained again
    for number in (1, 2):
        second.progress.epoch_done(epoch(number))
    second.progress.finish(RunSummary("r", "completed", journal.folder))
    assert first.display.notes == second.display.notes == []
    found = read(TrackedRun("r", journal.folder, "0123456789abcdef"))
    assert sorted((metric, step) for metric, step, _ in found) == sorted(
        [
            ("validation/reward", 0),
            *((each, step) for each in ("epoch", "reward/mean", "steps/made") for step in (4, 8, 12)),
        ]
    )
    assert {step: round(value, 6) for metric, step, value in found if metric == "reward/mean"} == {
        4: 0,
        8: 0.1,
        12: 0.2,
    }
    assert capsys.readouterr().out == ""  # which is the result of a command


def test_a_tracker_says_which_server_it_sends_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from reinforge.config.loader import build_config
    from reinforge.trackers.mlflow import MLflowConfig
    from reinforge.trackers.wandb import WandbConfig
    from reinforge.trainer.setup.reach import list_reach

    for name in ("WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    assert (WandbConfig(mode="offline").url, MLflowConfig().url) == ("", "")
    assert MLflowConfig(tracking_uri="sqlite:///x").url == ""
    trackers = {"team": {"_type": "wandb"}, "own": {"_type": "mlflow", "tracking_uri": "http://host:5000"}}
    trackers |= {"quiet": {"_type": "wandb", "mode": "offline"}}
    reach = list_reach(build_config({"finetuning": {"trackers": trackers}}))
    assert reach.hosts == {
        "https://api.wandb.ai": ["finetuning.trackers.team"],
        "http://host:5000": ["finetuning.trackers.own"],
    }
