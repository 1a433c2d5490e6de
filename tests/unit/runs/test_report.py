from __future__ import annotations

import json
from pathlib import Path

import pytest

from reinforge.errors import StorageError
from reinforge.evaluation.statistics import Improvement
from reinforge.runs.report import write_report
from reinforge.runs.rows import EpochMetrics, PolicyVersion, ValidationRow
from reinforge.runs.summary import RunSummary, format_duration, write_summary
from reinforge.types.evaluation import MetricSummary


def figure(mean, num_examples=200, num_unscored=0):
    return MetricSummary("wins", mean, mean - 0.03, mean + 0.03, num_examples, num_unscored)


def finished(**changes):
    values = {
        "run_id": "ttt-7",
        "status": "completed",
        "reason": "the interval of the improvement [0.15, 0.23] lies above 0 (+0.190 on 198 examples)",
        "folder": Path("runs/ttt-7"),
        "baseline": figure(0.41),
        "final": figure(0.6),
        "best": figure(0.61),
        "confirm_base": figure(0.4, 198, 2),
        "confirm_tuned": figure(0.59, 198, 2),
        "improvement": Improvement(0.19, 0.15, 0.23, 0.0002, 198, "paired t interval; sign-flip test, exact"),
        "promoted": True,
        "episodes": {"ok": 1150, "policy_error": 20, "timeout": 20, "judge_error": 10, "backend_error": 0},
        "tokens": {"prompt": 1234567, "completion": 345678, "trained": 300000},
        "wall_time_s": {"COLLECT": 480.0, "AWAIT": 200.0, "VALIDATE": 60.3, "ADOPT": 1.0, "SELECT": 0.1},
        "policy_versions": [
            PolicyVersion(0, "a", 0),
            PolicyVersion(1, "b", 8),
            PolicyVersion(2, "c", 8),
        ],
        "checkpoint": "checkpoints/step-000002",
        "config_sha256": "abc",
    }
    return RunSummary(**(values | changes))


def test_promoted_run_in_ten_lines():
    assert finished().closing_lines(color=False) == [
        "ttt-7 improved the agent",
        "  reward      0.400 [0.370, 0.430] -> 0.590 [0.560, 0.620] (wins on 198 confirm examples, 2 unscored)",
        "  improvement +0.190 [+0.150, +0.230], 95 % interval over 198 examples, p < 0.001",
        "  promoted    yes: the interval of the improvement [0.15, 0.23] lies above 0 (+0.190 on 198 examples)",
        "  best        checkpoints/step-000002, 0.610 [0.580, 0.640] on select",
        "  time        12 min 21 s (collect 8 min 0 s, train 3 min 20 s, validate 1 min 0 s, publish 1.0 s)",
        "  tokens      1,234,567 prompt, 345,678 sampled, 300,000 trained; 16 optimizer steps",
        "  episodes    1,200 (1,150 ok, 20 policy_error); dropped 30: 20 timeout, 10 judge_error",
        "  report      runs/ttt-7/report.md, runs/ttt-7/reward_plot.png",
        "  model       runs/ttt-7/model (load it with from_pretrained)",
    ]


def test_colour_does_not_change_the_text():
    plain, coloured = finished().closing_lines(color=False), finished().closing_lines(color=True)
    assert "\x1b[" in coloured[0]
    assert not any("\x1b" in line for line in plain)
    assert len(plain) == len(coloured)


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        (
            {"promoted": False, "improvement": Improvement(0.01, -0.01, 0.04, 0.3, 198, "")},
            "shows no improvement on held-out examples",
        ),
        ({"promoted": False, "improvement": Improvement(-0.1, -0.2, -0.04, 0.01, 198, "")}, "made the agent worse"),
        ({"promoted": False}, "improved the agent, but did not pass the gate"),
        ({"promoted": False, "improvement": None}, "shows no improvement on held-out examples"),
        ({"promoted": None}, "finished without a verdict"),
        (
            {"promoted": False, "policy_versions": [PolicyVersion(0, "a", 0)]},
            "trained nothing: no optimizer step was made",
        ),
        ({"promoted": None, "policy_versions": []}, "finished without a verdict"),
        ({"promoted": None, "status": "failed"}, "failed"),
        ({"promoted": None, "status": "cancelled"}, "was cancelled"),
        ({"promoted": None, "status": "stopped"}, "stopped early"),
    ],
)
def test_headline_says_how_it_ended(changes, headline):
    assert finished(**changes).headline() == headline


def test_a_run_without_improvement_says_why():
    reason = "the interval of the improvement [-0.01, 0.04] includes 0 (+0.015 on 198 examples)"
    lines = finished(
        promoted=False, reason=reason, improvement=Improvement(0.015, -0.01, 0.04, 0.4, 198, "")
    ).closing_lines(False)
    assert lines[0] == "ttt-7 shows no improvement on held-out examples"
    assert f"  promoted    no: {reason}" in lines
    assert not any(line.startswith("  model") for line in lines)


def test_a_stopped_run_says_what_was_saved():
    run = RunSummary(
        "ttt-7", "stopped", Path("runs/ttt-7"), "limits.max_minutes:\n10 minutes are over", baseline=figure(0.41)
    )
    assert run.closing_lines(color=False) == [
        "ttt-7 stopped early",
        "  reward      0.410 [0.380, 0.440] -> unknown (wins on 200 select examples)",
        "  reason      limits.max_minutes: 10 minutes are over",
        "  best        no checkpoint",
        "  time        unknown",
        "  tokens      unknown",
        "  episodes    0; dropped 0",
        "  report      runs/ttt-7/report.md, runs/ttt-7/reward_plot.png",
        "  saved       runs/ttt-7 (episodes, metrics and checkpoints so far)",
    ]


def test_failed_run_says_where_the_log_is():
    lines = RunSummary("ttt-7", "failed", Path("runs/ttt-7"), "the backend does not answer").closing_lines(False)
    assert lines[1] == "  reward      unknown: no evaluation finished"
    assert lines[-2:] == [
        "  log         runs/ttt-7/run.log",
        "  saved       runs/ttt-7 (episodes, metrics and checkpoints so far)",
    ]


def test_summary_has_its_fields_in_order(tmp_path):
    write_summary(tmp_path / "summary.json", finished())
    written = json.loads((tmp_path / "summary.json").read_text())
    fields = "run_id status reason baseline final best confirm_base confirm_tuned improvement promoted episodes tokens"
    assert " ".join(written) == f"{fields} wall_time_s policy_versions checkpoint config_sha256"
    assert list(written["confirm_base"]) == ["metric", "mean", "ci_low", "ci_high", "num_examples", "num_unscored"]
    assert written["improvement"]["mean_difference"] == 0.19
    assert written["improvement"]["method"].startswith("paired t")
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_what_is_unknown_is_null(tmp_path):
    write_summary(tmp_path / "summary.json", RunSummary("r", "failed", tmp_path, "no data"))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["baseline"], written["improvement"], written["promoted"]) == (None, None, None)


def test_a_summary_that_json_cannot_hold_leaves_the_previous_one(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("before")
    with pytest.raises(StorageError, match=r"cannot write .*summary\.json"):
        write_summary(path, finished(wall_time_s={"COLLECT": float("nan")}))
    assert path.read_text() == "before"
    with pytest.raises(StorageError):
        write_summary(tmp_path / "nowhere" / "summary.json", finished())


def test_report_holds_the_summary_and_the_epochs(tmp_path):
    rewards = [
        EpochMetrics(0, 0.5, 0.4, 0.6, num_groups=64, num_groups_kept=0, curriculum_percentile=0.3, num_missing=2),
        EpochMetrics(1, num_groups=0, num_groups_kept=0, curriculum_percentile=0.3, num_missing=64),
    ]
    validations = [ValidationRow(-1, 0.41, 0.38, 0.44), ValidationRow(1, error="down | out")]
    write_report(tmp_path / "report.md", finished(), rewards, validations)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# ttt-7 improved the agent\n")
    assert "| promoted | yes: the interval" in text
    assert "![Reward by epoch](reward_plot.png)" in text
    table = text[text.index("| epoch") :].splitlines()
    assert table[2:5] == [
        "| base |  |  |  |  |  | 0.410 [0.380, 0.440] |",
        "| 0 | 0.500 [0.400, 0.600] | unknown | 0 of 64 | 30% | 2 |  |",
        r"| 1 | unknown | unknown | 0 of 0 | 30% | 64 | unknown: down \| out |",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.41, "0.4 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
