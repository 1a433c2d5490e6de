from dataclasses import replace

import pytest

from reinforge.config.schema import FinetuneConfig, GateConfig
from reinforge.trainer.gate import decide, describe_power, refuse_no_verdict
from reinforge.types.evaluation import EvalInputItem, EvaluationReport, MetricSummary


def report(scores, num_examples=None, error=None, **more):
    by_metric = {"wins": scores, **more}
    by_metric = {
        metric: {f"e{n}": float(s) for n, s in enumerate(values) if s is not None}
        for metric, values in by_metric.items()
    }
    return EvaluationReport("confirm", 3, by_metric, num_examples or len(scores), {}, "wins", error=error)


def names(count, num_clusters=None):
    return [str(n % (num_clusters or count)) for n in range(count)]


def in_clusters(size, *reports):
    clusters = {f"e{n}": str(n // size) for n in range(40)}
    return [replace(each, clusters=clusters) for each in reports]


def test_power_is_told_with_its_assumption():
    assert describe_power(GateConfig(), names(20)) == (
        "20 confirm examples cannot show less than ±0.24 (for scores of 0 and 1 that change on a quarter of the "
        "examples); more examples or a larger finetuning.gate.num_samples can show less"
    )
    many = describe_power(GateConfig(num_samples=4, margin=0.02), names(1000))
    assert many == (
        "1,000 confirm examples, 4 episodes each, cannot show less than ±0.04 (for scores of 0 and 1 that change on a "
        "quarter of the examples, with the margin 0.02)"
    )
    assert describe_power(GateConfig(), names(1)) == "1 confirm example: fewer than 6 can never show an improvement"
    of_few = describe_power(GateConfig(), names(100, 20))
    assert of_few.startswith("100 confirm examples of 20 prompts cannot show less than ±0.24 (")
    few = "100 confirm examples of 5 prompts: fewer than 6 can never show an improvement"
    assert describe_power(GateConfig(), names(100, 5)) == few
    against = describe_power(GateConfig(reference="logs"), names(100))
    assert against.startswith("100 confirm examples give an interval of ±0.10 (")
    assert against.endswith("); not worse than logs needs one above -0.02")


@pytest.mark.parametrize(
    ("num_confirm", "settings", "said"),
    [
        (6, {}, None),
        (5, {"gate": {"allow_no_verdict": True}}, None),
        (5, {}, "5 confirm examples: fewer than 6 can never show an improvement, so the run does not start"),
        (5, {}, "fix: set finetuning.splits.confirm: 6 or more; or train without a verdict: finetuning.gate.allow_no"),
        (1, {}, "fix: add examples, 8 with different prompts at least, and set finetuning.splits.confirm: 6"),
        (5, {"splits": {"key": "split"}}, "fix: give 6 or more with different prompts to confirm (split)"),
    ],
)
def test_a_run_that_can_never_show_an_improvement_is_refused_unless_asked(num_confirm, settings, said):
    sizes = {"train": 3, "select": 2, "confirm": num_confirm}
    row = {"input_obj": "q", "expected_output_obj": None, "full_dataset_entry": {}}
    splits = {name: [EvalInputItem(id=f"{name}{n}", **row) for n in range(sizes[name])] for name in sizes}
    problems = refuse_no_verdict(FinetuneConfig(**settings), splits, {})
    assert (said is None) == (not problems)
    assert said is None or said in str(problems[0])
    few = dict.fromkeys((item.id for item in splits["confirm"]), "one prompt")
    assert refuse_no_verdict(FinetuneConfig(), splits, few) != []


def test_missing_examples_are_told_with_the_commonest_reason():
    told = MetricSummary("wins", 0.5, None, None, 30, 10, "tool_error: no row 3")
    base = replace(report([None] * 10 + HALF[10:]), summaries={"wins": told})
    verdict = judge(base, report(BETTER))
    assert verdict.promoted is None
    assert verdict.reason.endswith("that gate.max_missing allows; the most common reason: tool_error: no row 3")
    assert verdict.confirm_tuned.unscored_reason == "tool_error: no row 3", "the other arm's, which drops them for both"


def judge(base, tuned, **gate):
    return decide(GateConfig(**gate), "wins", base, tuned)


HALF = [0, 1] * 20
BETTER = [1, 1] * 20


GAPS = [None] * 5 + HALF[5:], BETTER[:-5] + [None] * 5
INTERVAL = "the interval of the improvement [0.34, 0.66]"


@pytest.mark.parametrize(
    ("base", "tuned", "gate", "promoted", "reason"),
    [
        (HALF, BETTER, {}, True, f"{INTERVAL} lies above 0 (+0.500 on 40 examples)"),
        (HALF, [1, 1, 0, 0] * 10, {}, False, "[-0.23, 0.23] includes 0 (+0.000 on 40 examples)"),
        (BETTER, HALF, {}, False, "the new model is worse"),
        (HALF, HALF, {}, False, "each of the 40 examples has the same score before and after"),
        ([0.5] * 10, [0.5] * 10, {}, False, "each of the 10 examples has the same score before and after"),
        ([1] * 10, [1] * 10, {}, False, "each of the 10 examples has the same score before and after"),
        (HALF, BETTER, {"margin": 0.4}, False, f"{INTERVAL} does not lie above the margin 0.4"),
        (HALF, BETTER, {"margin": 0.3}, True, ""),
        ([0.5, 0.6] * 20, [0.51, 0.59] * 20, {"margin": -0.05}, True, "lies above the margin -0.05"),
        # 5 of 100 got better, none worse: t interval [0.007, 0.093], but 2 / 2^5 = 0.0625
        ([0] * 100, [1] * 5 + [0] * 95, {}, False, "p = 0.062"),
        ([0.1] * 5, [0.5, 0.6, 0.5, 0.6, 0.5], {}, False, "fewer than 6 examples can never reach that"),
        (*GAPS, {}, None, "10 of 40 confirm examples (25%) are missing in at least one arm, more than the 20%"),
        (*GAPS, {"max_missing": 0.25}, True, ""),
        (HALF, BETTER, {"metric": "lgal"}, None, "lgal was not scored for the base model (scored: wins)"),
        (HALF, HALF, {"guard_metrics": {"legal": 0.1}}, False, ""),
        (HALF, BETTER, {"guard_metrics": {"legal": 0.1}}, None, "guard metric legal could not be checked: legal was"),
    ],
)
def test_a_verdict_and_its_reason(base, tuned, gate, promoted, reason):
    verdict = judge(report(base), report(tuned), **gate)
    assert verdict.promoted is promoted
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("before", "after", "loss", "promoted", "reason"),
    [
        ([0.9, 1.0] * 20, [0.91, 0.99] * 20, 0.05, True, ""),
        ([1] * 40, [1] * 30 + [0] * 10, 0.05, False, "guard metric legal may have dropped by more than 0.05"),
        # 40 of 40 before and after: a loss on up to 1 - 0.025^(1/40) = 8.8 % of examples cannot be excluded
        ([1] * 40, [1] * 40, 0.1, True, ""),
        (
            [1] * 40,
            [1] * 40,
            0.05,
            False,
            "40 examples are too few to rule out that guard metric legal dropped",
        ),
    ],
)
def test_a_guard_that_may_have_lost_stops_the_promotion(before, after, loss, promoted, reason):
    verdict = judge(report(HALF, legal=before), report(BETTER, legal=after), guard_metrics={"legal": loss})
    assert verdict.promoted is promoted
    assert reason in verdict.reason
    assert [(guard.metric, guard.passed) for guard in verdict.guards] == [("legal", promoted)]


def test_the_figures_of_a_verdict():
    verdict = judge(report(HALF), report(BETTER))
    assert verdict.improvement.mean_difference == 0.5
    assert (verdict.confirm_base.mean, verdict.confirm_tuned.mean) == (0.5, 1.0)
    assert judge(*map(report, GAPS)).improvement.num_pairs == 30, "also where too many are missing"


@pytest.mark.parametrize("num_pairs", [0, 1])
def test_fewer_than_two_pairs_give_no_verdict(num_pairs):
    verdict = judge(report([0] * num_pairs, 2), report([1, 1]), max_missing=1.0)
    assert verdict.promoted is None
    assert "at least 2 are needed" in verdict.reason
    assert verdict.improvement is None
    assert verdict.confirm_base.num_unscored == 2 - num_pairs


def test_what_one_arm_misses_is_dropped_for_both():
    verdict = judge(report([0, 0, *HALF]), report([None, 1, *BETTER]))
    assert verdict.confirm_base.num_examples == verdict.confirm_tuned.num_examples == 41
    assert verdict.confirm_base.num_unscored == 1
    difference = verdict.confirm_tuned.mean - verdict.confirm_base.mean
    assert verdict.improvement.mean_difference == pytest.approx(difference)


def test_failed_arm_gives_no_verdict():
    verdict = judge(report(HALF, error="the backend does not answer"), report(BETTER))
    assert verdict.promoted is None
    assert "the evaluation of the base model failed: the backend does not answer" in verdict.reason


def test_gate_metric_replaces_the_reward():
    base, tuned = report(HALF, legal=[0] * 40), report(HALF, legal=[1] * 40)
    verdict = judge(base, tuned, metric="legal")
    assert verdict.promoted is True
    assert verdict.confirm_base.metric == "legal"


def test_examples_of_one_conversation_do_not_count_as_many():
    base, tuned = [0] * 40, [1] * 8 + [0] * 32
    assert judge(report(base), report(tuned)).promoted is True
    verdict = judge(*in_clusters(8, report(base), report(tuned)))  # all that changed is one of five conversations
    assert verdict.promoted is False
    assert "over 5 clusters" in verdict.improvement.method
    assert "40 examples of 5 prompts" in verdict.reason
    assert (verdict.confirm_tuned.num_examples, verdict.confirm_tuned.num_clusters) == (40, 5)
    assert verdict.changes[0].improvement == verdict.improvement, "the table of the evaluators says the same"


def test_a_guard_counts_conversations_too():
    gate, before, after = GateConfig(guard_metrics={"safe": 0.2}), report(HALF, safe=[1] * 40), [0] * 4 + [1] * 36
    assert decide(gate, "wins", before, report(BETTER, safe=after)).promoted is True
    verdict = decide(gate, "wins", *in_clusters(5, before, report(BETTER, safe=after)))
    assert verdict.promoted is False
    assert "may have dropped by more than 0.2" in verdict.reason


def test_a_single_conversation_is_no_verdict():
    verdict = judge(*in_clusters(40, report(HALF), report(BETTER)))
    assert verdict.promoted is None
    assert "the 40 examples share one conversation" in verdict.reason


def test_too_few_conversations_are_told_as_the_reason():
    tuned = [1 if n % 8 < 6 else 0 for n in range(39)] + [1]  # all five conversations improve, not all alike
    verdict = judge(*in_clusters(8, report([0] * 40), report(tuned)))
    assert verdict.improvement.ci_low > 0
    assert verdict.promoted is False
    assert verdict.reason.endswith("at most 0.05; fewer than 6 prompts can never reach that")
