import json
from dataclasses import replace
from pathlib import Path

import pytest

from reinforge.errors import StorageError
from reinforge.evaluation.changes import MetricChange
from reinforge.evaluation.statistics import Improvement
from reinforge.runs.predictions import Prediction
from reinforge.runs.report import write_report
from reinforge.runs.rows import EpochMetrics, GuardEvent, PolicyVersion, ValidationRow
from reinforge.runs.summary import Explanation, RunSummary, format_duration, load_summary, write_summary
from reinforge.types.evaluation import MetricSummary

pytestmark = pytest.mark.usefixtures("plots")


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
        "policy_versions": [PolicyVersion(0, "a", 0), PolicyVersion(1, "b", 8), PolicyVersion(2, "c", 8)],
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
        "  next        reinforge serve runs/ttt-7 --compare; reinforge export runs/ttt-7",
    ]


def count_rows(lines):
    return sum(-(-len(line) // 100) for line in lines)


def test_the_closing_lines_fit_one_screen():
    """Three reasons of two rows, their fixes, eight evaluators, guards and predictions: verdict, why and next stay."""
    why = [Explanation(f"cause {n}", "evidence " * 14, "a change of the settings " * 5) for n in range(3)]
    run = finished(
        promoted=False,
        reason="the interval [-0.02, 0.04] holds 0 " * 4,
        explanations=why,
        evaluators=[MetricChange(f"part {n}", "confirm", figure(0.4), figure(0.5)) for n in range(8)],
        guards=[GuardEvent(n, "no_signal", "warn", "most groups have equal rewards " * 3) for n in range(3)],
        predictions=[Prediction(name, 0.5, 0.4, 0.6, 0.55) for name in ("base", "signal", "seconds")],
    )
    assert count_rows(run.closing_lines(False)) > 30
    lines = run.closing_lines(False, 24)
    assert count_rows(lines) <= 23, "and the prompt of the shell"
    names = [line[2:13].strip() for line in lines[1:]]
    assert names[:2] == ["reward", "improvement"]
    assert "promoted" in names
    assert names.count("why") == names.count("try") == 3
    assert (names[-2:], lines[-1].split()[1]) == (["report", "more"], str(len(run.facts()) - len(names) + 1))
    assert run.closing_lines(False, 100) == run.closing_lines(False)
    assert len([line for line in run.closing_lines(False, 12) if line.startswith("  why")]) == 1


def test_color_does_not_change_the_text():
    plain, colored = finished().closing_lines(color=False), finished().closing_lines(color=True)
    assert "\x1b[" in colored[0]
    assert not any("\x1b" in line for line in plain)
    assert len(plain) == len(colored)


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
        "  saved       runs/ttt-7 (what the run has done so far)",
        "  resume      reinforge finetune --resume runs/ttt-7",
    ]


def change(metric, before, after, low, high, weight=None):
    improvement = Improvement(after - before, low, high, 0.01, 198, "")
    return MetricChange(metric, "confirm", figure(before, 198), figure(after, 198), improvement, weight)


def test_every_evaluator_before_and_after_and_the_warnings():
    """The reward rose, but only by its form: the run must say so where it says that the agent improved."""
    parts = [change("judge", 0.1, 0.1, -0.02, 0.02, 0.8), change("format", 0.5, 0.9, 0.3, 0.5, 0.2)]
    lines = finished(evaluators=parts, warnings=["the gain is that of format alone"]).closing_lines(False)
    assert lines[3:6] == [
        "  evaluator   judge 0.100 [0.070, 0.130] -> 0.100 [0.070, 0.130], change +0.000 [-0.020, +0.020], weight 0.8",
        "  evaluator   format 0.500 [0.470, 0.530] -> 0.900 [0.870, 0.930], change +0.400 [+0.300, +0.500], weight 0.2",
        "  warning     the gain is that of format alone",
    ]
    only = finished(evaluators=[change("wins", 0.4, 0.59, 0.15, 0.23)]).closing_lines(False)
    assert only == finished().closing_lines(False), "the only evaluator is the reward"


def test_counts_come_with_the_commonest_reason():
    unscored = replace(figure(0.59, 198, 2), unscored_reason="tool_error: no row 3")
    lines = finished(confirm_tuned=unscored, missing_reason="timeout: late (20 of 30)").closing_lines(False)
    assert lines[1].endswith("(wins on 198 confirm examples, 2 unscored: tool_error: no row 3)")
    dropped = "dropped 30: 20 timeout, 10 judge_error; the most common reason: timeout: late (20 of 30)"
    assert f"  episodes    1,200 (1,150 ok, 20 policy_error); {dropped}" in lines


def test_a_stopped_run_tells_its_best_checkpoint_and_how_to_use_it():
    run = RunSummary(
        "ttt-7", "stopped", Path("runs/ttt-7"), "10 minutes are over", baseline=figure(0.067), best=figure(0.64),
        checkpoint="checkpoints/step-000004",
    )  # fmt: skip
    lines = run.closing_lines(color=False)
    assert lines[1] == (
        "  reward      0.067 [0.037, 0.097] -> 0.640 [0.610, 0.670] (wins on 200 select examples, "
        "the best validation so far)"
    )
    assert lines[3] == (
        "  best        checkpoints/step-000004, 0.640 [0.610, 0.670] on select; "
        "try it with `reinforge chat runs/ttt-7`, or load runs/ttt-7/checkpoints/step-000004 with from_pretrained"
    )


def test_a_stopped_run_whose_base_is_best_says_so():
    run, summaries = RunSummary("ttt-7", "stopped", Path("r"), ""), (figure(0.5), figure(0.4))
    rows = [ValidationRow(epoch, summaries={"wins": each}) for epoch, each in zip((-1, 0), summaries, strict=True)]
    run.record_best_so_far(rows, rows[0], "wins")
    lines = run.closing_lines(color=False)
    assert "  best        the base model, 0.500 [0.470, 0.530] on select: no validated checkpoint is better" in lines
    assert lines[1] == "  reward      0.500 [0.470, 0.530] -> 0.400 [0.370, 0.430] (wins on 200 select examples)"


def test_a_smoke_run_is_not_judged_by_its_figures():
    run = finished(smoke=True, promoted=False, improvement=None, evaluators=[change("wins", 0, 0, 0, 0)])
    lines = run.closing_lines(color=False)
    assert lines[:3] == [
        "ttt-7 passed its smoke test: every stage works",
        "  did         ran the agent, scored with wins, made 16 optimizer steps, published the new weights, validated, "
        "compared both models on confirm",
        "  next        run it without --smoke; metrics of two examples mean nothing",
    ]
    assert not any(line.startswith(("  promoted", "  reward")) for line in lines)
    assert finished(smoke=True, status="failed").headline() == "failed"


def test_a_summary_comes_back_as_it_was_written(tmp_path):
    parts = [change("judge", 0.1, 0.1, -0.02, 0.02, 0.8), MetricChange("format", "confirm", None, figure(1.0))]
    run = finished(folder=tmp_path, evaluators=parts, warnings=["w"], missing_reason="m", smoke=True, can_resume=False)
    run = replace(run, stages={"sft": 2, "grpo": 1}, transfer={"sums": run.improvement})
    write_summary(tmp_path / "summary.json", run)
    assert load_summary(tmp_path) == run


def test_failed_run_says_where_the_log_is():
    lines = RunSummary("ttt-7", "failed", Path("runs/ttt-7"), "the backend does not answer").closing_lines(False)
    assert lines[1] == "  reward      unknown: no evaluation finished"
    assert lines[-3:] == [
        "  log         runs/ttt-7/run.log",
        "  saved       runs/ttt-7 (what the run has done so far)",
        "  resume      reinforge finetune --resume runs/ttt-7",
    ]


def test_fields_that_nothing_used_are_in_the_report():
    assert ("ignored", "metadata, user") in finished(ignored=["metadata", "user"]).facts()


def test_summary_has_its_fields_in_order(tmp_path):
    write_summary(tmp_path / "summary.json", finished())
    written = json.loads((tmp_path / "summary.json").read_text())
    fields = "run_id status reason baseline final best confirm_base confirm_tuned improvement promoted episodes tokens"
    later = "evaluators warnings missing_reason smoke can_resume best_epoch num_jobs guards stages evaluators_sha256"
    later += " predictions ignored transfer explanations non_inferiority"
    assert " ".join(written) == f"{fields} wall_time_s policy_versions checkpoint config_sha256 {later}"
    figures = "metric mean ci_low ci_high num_examples num_unscored unscored_reason num_clusters"
    assert " ".join(written["confirm_base"]) == figures
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
        EpochMetrics(
            1,
            num_groups=0,
            num_groups_kept=0,
            curriculum_percentile=0.3,
            num_missing=64,
            missing_reason="the database is down",
        ),
    ]
    validations = [ValidationRow(-1, 0.41, 0.38, 0.44), ValidationRow(1, error="down | out")]
    write_report(tmp_path / "report.md", finished(), rewards, validations)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# ttt-7 improved the agent\n")
    assert "| promoted | yes: the interval" in text
    assert "![Reward by epoch](reward_plot.png)" in text
    table = text[text.index("| epoch") :].splitlines()
    assert table[2:5] == [
        "| base |  |  |  |  | 0.410 [0.380, 0.440] |",
        "| 0 | 0.500 [0.400, 0.600] | 0 of 64 | 30% | 2 |  |",
        "| 1 | unknown | 0 of 0 | 30% | 64: the database is down | unknown: down &#124; out |",
    ], "no column in which every value is unknown"


def test_report_shows_a_mean_without_interval_alone_and_no_column_of_unknowns(tmp_path):
    rewards = [EpochMetrics(0, 1.0, filtered_avg_reward=0.25, num_groups=4, num_groups_kept=2)]
    write_report(tmp_path / "report.md", finished(), rewards, [])
    text = (tmp_path / "report.md").read_text()
    assert "| epoch | training reward | reward of kept groups | groups kept |" in text
    assert "| 0 | 1.000 | 0.250 | 2 of 4 |" in text
    rows_of_a_dataset = [EpochMetrics(0, num_groups=4, num_groups_kept=4)]
    write_report(tmp_path / "report.md", finished(), rows_of_a_dataset, [ValidationRow(0, 0.5)])
    text = (tmp_path / "report.md").read_text()
    assert "| epoch | groups kept | validation |" in text
    assert "unknown" not in text
    no_group_kept = [EpochMetrics(0, 1.0, filtered_avg_reward=0.25, num_groups=4, num_groups_kept=2),
                     EpochMetrics(1, 1.0, num_groups=4, num_groups_kept=0, curriculum_percentile=1.0)]  # fmt: skip
    write_report(tmp_path / "report.md", finished(), no_group_kept, [])
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | 1.000 |  | 0 of 4 |\n" in text, "no mean of nothing, and no curriculum"


@pytest.mark.parametrize(("num_epochs", "num_rows"), [(20, 20), (21, 20), (60, 20)])
def test_report_shows_at_most_20_epochs_and_says_where_the_others_are(tmp_path, num_epochs, num_rows):
    rewards = [EpochMetrics(epoch, epoch / 100, 0.0, 1.0) for epoch in range(num_epochs)]
    write_report(tmp_path / "report.md", finished(), rewards, [])
    text = (tmp_path / "report.md").read_text()
    table = [line for line in text[text.index("| epoch") :].splitlines() if line.startswith("|")][2:]
    assert len(table) == num_rows
    assert table[-1].startswith(f"| {num_epochs - 1} |")
    said = {20: "", 21: "1 more epoch, 10: see", 60: "40 more epochs, 10 to 49: see"}[num_epochs]
    assert said in text
    assert ("more epoch" in text) is bool(said)


def test_report_shows_what_others_wrote_as_text(tmp_path):
    write_report(tmp_path / "report.md", finished(run_id="<img onerror=x> ![](u)"), [], [])
    text = (tmp_path / "report.md").read_text()
    assert "<img" not in text.replace("![Reward by epoch](reward_plot.png)", "")
    assert "![](u)" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.41, "0.4 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_the_stages_of_a_pipeline_are_named(tmp_path):
    """Epochs 0 and 1 are sft's, epoch 2 is grpo's: the best checkpoint is of sft."""
    summary = finished(stages={"sft": 2, "grpo": 1}, best_epoch=1)
    assert ("stages", "sft (2 epochs), grpo (1 epoch)") in summary.facts()
    assert summary.describe_best().startswith("checkpoints/step-000002 (stage sft), ")
    assert finished(best_epoch=1).describe_best().startswith("checkpoints/step-000002, ")
    rows = [EpochMetrics(epoch, 0.5, stage=name) for epoch, name in enumerate(("sft", "sft", "grpo"))]
    write_report(tmp_path / "report.md", summary, rows, [])
    text = (tmp_path / "report.md").read_text()
    assert "| epoch | stage |" in text
    assert "| 2 | grpo |" in text
    write_report(tmp_path / "report.md", finished(), [EpochMetrics(0, 0.5)], [])
    assert "stage |" not in (tmp_path / "report.md").read_text()
