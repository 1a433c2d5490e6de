"""Why a run was not promoted: for each reason a run whose records name it first, in figures to check by eye."""

from dataclasses import replace
from pathlib import Path

import pytest

from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.statistics import Improvement, count_needed_pairs
from reinforge.runs.predictions import SIGNAL, Prediction
from reinforge.runs.rows import EpochMetrics, PolicyVersion, ValidationRow
from reinforge.runs.summary import RunSummary
from reinforge.trainer.explanation import RunFigures, explain
from reinforge.types.evaluation import MetricSummary

EPOCHS = 10


def config(**changes):
    return FinetuneConfig.model_validate({"num_epochs": EPOCHS, "reward_function": {"name": "reward"}, **changes})


def epochs(start=0.4, end=0.4, **changes):
    """Ten epochs whose reward goes in equal steps from `start` to `end`; a quarter of the groups have equal rewards."""
    known = {
        "num_groups": 20,
        "num_groups_zero_variance": 5,
        "clipped_share": 0.0,
        "job": {"direction": 0.05, "lr": 1e-4},
    }
    rewards = [start + (end - start) * epoch / (EPOCHS - 1) for epoch in range(EPOCHS)]
    return [
        EpochMetrics(epoch, avg_reward=reward, ci_low=reward - 0.05, ci_high=reward + 0.05, **(known | changes))
        for epoch, reward in enumerate(rewards)
    ]


def validations(*scores, metric="reward", rewards=None):
    """Validations of the base model and after every second epoch, with intervals of +-0.05."""
    rows = []
    for number, score in enumerate(scores):
        reward = score if rewards is None else rewards[number]
        summary = MetricSummary(metric, score, score - 0.05, score + 0.05, 40, 0)
        epoch = -1 if number == 0 else 2 * number - 1
        row = ValidationRow(epoch, reward, reward - 0.05, reward + 0.05, 40, metrics={metric: score, "reward": reward})
        rows.append(replace(row, summaries={metric: summary}))
    return rows


FLAT = validations(0.4, 0.42, 0.45, 0.41, 0.43, 0.43)


def finished(change=(-0.01, 0.06), steps=100, **changes):
    """A run that was not promoted; `change` is its mean and half width on 100 confirm examples."""
    mean, half = change
    known = {
        "improvement": Improvement(mean, mean - half, mean + half, 0.3, 100, ""),
        "promoted": False,
        "reason": "the interval includes 0",
        "policy_versions": [PolicyVersion(0, "a", 0), PolicyVersion(1, "b", steps)],
    }
    return RunSummary("r", folder=Path("runs/r"), **({"status": "completed"} | known | changes))


def list_reasons(*records):
    return explain(RunFigures(*records))


def first(summary, rows, scores, settings=None):
    return list_reasons(summary, rows, scores, settings or config())[0]


def test_a_promoted_run_a_smoke_run_and_one_without_verdict_are_not_explained():
    args = epochs(num_groups_zero_variance=20), FLAT, config()
    assert list_reasons(finished(promoted=True), *args) == []
    assert list_reasons(finished(smoke=True), *args) == []
    assert list_reasons(finished(promoted=None, status="failed"), *args) == []
    assert list_reasons(finished(), *args) != []


def test_no_signal_compares_with_what_preflight_expected():
    rows = epochs(num_groups_zero_variance=16, num_groups_low_spread=2)
    found = first(finished(predictions=[Prediction(SIGNAL, 0.6)]), rows, FLAT)
    assert found.reason == "no signal"
    evidence = "90% of the groups have equal rewards, so nothing is learned from them; preflight expected 40%"
    assert found.evidence == evidence
    assert "num_generations" in found.fix
    assert "harder" in first(finished(), epochs(0.95, 0.95, num_groups_zero_variance=18), FLAT).fix


def test_signal_that_ran_out_is_not_called_too_few_steps():
    """A model that answers always "yes" after a few steps."""
    rows = [replace(row, num_groups_zero_variance=equal) for row, equal in zip(epochs(), (5, 12, 19, 20), strict=False)]
    found = list_reasons(finished(steps=8), rows, FLAT, config())
    assert found[0].reason == "signal ran out"
    assert found[0].evidence == "25% of the groups had equal rewards in the first epoch, 98% in the last two"
    assert "lower finetuning.policy.optimizer.learning_rate" in found[0].fix
    assert "too few steps" not in [each.reason for each in found]
    rows[2] = replace(rows[2], num_groups_zero_variance=17)
    assert first(finished(steps=8), rows, FLAT).reason == "too few steps"


def test_cut_replies_stand_before_the_signal_that_they_cost():
    rows = epochs(clipped_share=0.5, clipped_avg_reward=0.1, num_groups_zero_variance=18)
    found = list_reasons(finished(), rows, FLAT, config())
    assert [each.reason for each in found][:2] == ["replies were cut off", "no signal"]
    assert found[0].evidence == "50% of the training episodes reach max_tokens; they earn 0.10, all 0.40"


def test_replies_of_one_token_are_not_called_cut_off():
    rows = epochs(clipped_share=1.0, clipped_avg_reward=0.4)
    assert "cut off" not in str(list_reasons(finished(), rows, FLAT, config()))


def test_episodes_that_were_too_long_are_cut_off_too():
    found = first(finished(episodes={"ok": 60, "overlong": 30, "context_overflow": 10}), epochs(), FLAT)
    assert (found.reason, found.evidence) == (
        "replies were cut off",
        "40% of the episodes were too long for their limit",
    )


def test_a_reward_that_rises_without_the_metric_was_satisfied_otherwise():
    scores = validations(0.3, 0.32, 0.31, 0.29, metric="right", rewards=[0.4, 0.5, 0.6, 0.7])
    found = first(finished(), epochs(0.4, 0.7), scores, config(gate={"metric": "right"}))
    assert found.reason == "rewarded otherwise"
    assert found.evidence == "on select the reward reward went from 0.400 to 0.700, but right from 0.300 to 0.290"
    both = validations(0.3, 0.4, 0.5, 0.6, metric="right", rewards=[0.4, 0.5, 0.6, 0.7])
    assert first(finished(), epochs(0.4, 0.7), both, config(gate={"metric": "right"})).reason != found.reason


def test_few_steps_are_named_with_the_epochs_that_make_them_enough():
    found = first(finished(steps=5), epochs(), FLAT)
    assert found.reason == "too few steps"
    moved = "together they moved log-probs by +0.5 nats a token toward the reward"
    assert found.evidence == f"5 optimizer steps in 10 epochs; {moved}"
    assert found.fix == "train on: reinforge finetune --resume runs/r --more 30"  # 40 epochs of half a step: 20 steps
    assert first(finished(steps=5), epochs(), FLAT, config(num_epochs=20)).fix.endswith("--resume runs/r")


def test_a_run_that_was_still_rising_trains_on():
    found = first(finished((0.01, 0.06)), epochs(), validations(0.4, 0.41, 0.43, 0.45))
    assert found.reason == "too few steps"
    assert found.evidence.endswith("the last validation is the best (0.450)")
    assert found.fix.endswith("--more 10")


def test_steps_that_move_nothing_are_too_small():
    found = first(finished(), epochs(job={"direction": 0.0004, "lr": 1e-7}), FLAT)  # 0.004 of 0.05
    assert found.reason == "too small steps"
    assert "by +0.004 nats a token" in found.evidence
    assert "finetuning.policy.optimizer.learning_rate three to ten times (it was 1e-07)" in found.fix
    assert "reinforge improve FILE" in found.fix
    begun = epochs(job={"direction": 0.0004, "lr": 1e-4})  # 0.004 in one step: 0.08 in 20
    assert first(finished(steps=1), begun, FLAT).reason == "too few steps"


def test_a_training_reward_that_rises_alone_is_over_fitted():
    scores = validations(0.4, 0.42, 0.45, 0.41, 0.43, 0.44)  # the last one after epoch 9
    found = first(finished(), epochs(0.4, 0.9), scores)
    assert found.reason == "over-fitted"
    assert found.evidence.startswith(
        "since the start the training reward has changed by +0.500, but the reward on the "
    )
    assert found.fix.startswith("the model learns its training examples")


def test_a_fall_after_an_early_peak_is_over_fitted():
    found = first(finished(), epochs(), validations(0.4, 0.6, 0.5, 0.45, 0.45, 0.42))
    assert (found.reason, found.evidence) == (
        "over-fitted",
        "the score on select peaked at 0.600 after epoch 1, and ended at 0.420",
    )
    late = first(finished(), epochs(), validations(0.4, 0.41, 0.42, 0.43, 0.6, 0.42))
    assert late.reason == "better on select only"


def test_a_gain_on_select_that_confirm_excludes_was_luck():
    found = first(finished((-0.02, 0.06)), epochs(), validations(0.4, 0.42, 0.45, 0.41, 0.5, 0.46))
    assert found.reason == "better on select only"
    said = "the best of 5 validations is +0.100 above the base model"
    assert found.evidence == f"{said}, but on confirm it is -0.020 [-0.080, +0.040]"


def test_too_few_examples_are_named_with_how_many_it_takes():
    found = list_reasons(finished((0.05, 0.06)), epochs(), FLAT, config())
    assert [each.reason for each in found] == ["too few confirm examples"]
    # standard error 0.06 / 1.984 = 0.0302; 100 * (3.2415 * 0.0302 / 0.05)^2 = 384.4
    assert found[0].evidence.endswith(
        "on 100 confirm examples; to show one of this size in 9 of 10 runs takes about 385"
    )
    assert "finetuning.splits.confirm: 385" in found[0].fix


@pytest.mark.parametrize(
    ("change", "margin", "needed"),
    [
        (Improvement(0.1, -0.0984, 0.2984, 0.3, 100, ""), 0.0, 1051),
        (Improvement(0.1, -0.0984, 0.2984, 0.3, 100, ""), 0.05, 4204),
        (Improvement(-0.1, -0.3, 0.1, 0.3, 100, ""), 0.0, None),
        (Improvement(0.1, None, None, 0.3, 100, ""), 0.0, None),
    ],
)
def test_the_number_of_examples_that_an_effect_takes(change, margin, needed):
    assert count_needed_pairs(change, margin) == (needed and pytest.approx(needed, rel=1e-3))


def test_a_guard_metric_that_held_it_back_is_the_only_reason():
    summary = finished(improvement=Improvement(0.2, 0.15, 0.25, 0.001, 100, ""), reason="format may have dropped")
    [found] = list_reasons(
        summary, epochs(num_groups_zero_variance=20), FLAT, config(gate={"guard_metrics": {"format": 0.05}})
    )
    assert (found.reason, found.evidence) == ("a guard metric held it back", "format may have dropped")
    assert "make format part of the reward" in found.fix


def test_at_most_three_reasons_and_a_way_on_where_none_is_found():
    rows = epochs(clipped_share=0.5, clipped_avg_reward=0.1, num_groups_zero_variance=18)
    assert (
        len(list_reasons(finished((-0.02, 0.01), steps=3), rows, validations(0.4, 0.6, 0.4, 0.4, 0.4, 0.4), config()))
        == 3
    )
    [found] = list_reasons(finished((-0.01, 0.06)), epochs(), FLAT, config())
    assert found.reason == "no single cause"
    assert "reinforge improve FILE" in found.fix


def test_the_closing_lines_and_the_summary_have_them(tmp_path):
    summary = finished(steps=5)
    summary.explanations = list_reasons(summary, epochs(), FLAT, config())
    lines = summary.closing_lines(color=False)
    [why] = [number for number, line in enumerate(lines) if line.startswith("  why ")]
    assert lines[why].startswith("  why         too few steps: 5 optimizer steps in 10 epochs;")
    assert lines[why + 1] == "  try         train on: reinforge finetune --resume runs/r --more 30"
    assert summary.as_dict()["explanations"][0]["reason"] == "too few steps"
