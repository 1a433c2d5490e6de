"""Noise, lengths and the smallest improvement, from sampled episodes."""

import math
from dataclasses import replace

import numpy as np
import pytest

from reinforge.config.schema import FinetuneConfig, GateConfig
from reinforge.evaluation.statistics import compute_mean_interval, count_independent, predict_share
from reinforge.runs.rows import EpochMetrics
from reinforge.trainer.preflight.analysis import (
    choose_replies,
    describe_weak_training,
    find_cut_harm,
    measure_detectable,
    measure_lengths,
    measure_noise,
    measure_signal_share,
    measure_solved_share,
    measure_within_variance,
    predict_signal_share,
)
from reinforge.trainer.preflight.recommendation import Advice, Findings, recommend
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.evaluation import EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest
from tests.doubles import examples

HUNDRED = [str(n) for n in range(100)]


def test_an_evaluator_that_repeats_itself_has_no_noise():
    noise = measure_noise([(0.5, 0.5)] * 10, [[0, 1], [0, 1]])
    assert (noise.num_answers, noise.num_changed, noise.deviation, noise.share) == (10, 0, 0.0, 0.0)


def test_noise_is_compared_with_the_spread_within_groups():
    """Scores (1, 0) and (1, 1): variance 0.5 / 2 = 0.25, deviation 0.5; rewards 0 and 1 in a group: variance 0.5."""
    noise = measure_noise([(1, 0), (1, 1)], [[0, 1], [1, 0]])
    assert (noise.num_changed, noise.deviation, noise.share) == (1, 0.5, 0.5)
    assert measure_noise([(1, 0)], [[1, 1]]).share == 1.0, "all of no spread"
    assert measure_noise([(1, 0)], []).share is None
    assert measure_noise([], [[0, 1]], "no answer has a score").reason == "no answer has a score"


def test_eight_replies_show_what_comes_back_from_the_worst_to_the_best():
    """15 examples with the scores 0 to 14: every second one; of an example the first episode counts."""
    records = [
        replace(
            record((1, 1, "length" if number == 14 else "stop")),
            key=EpisodeKey("collect", 0, str(number), generation),
            scores={"m": EvalOutputItem(id=str(number), score=number + generation / 2, reasoning=None)},
        )
        for number in range(15)
        for generation in range(2)
    ]
    replies = choose_replies(records, "m")
    assert [reply.score for reply in replies] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [reply.is_cut for reply in replies] == [False] * 7 + [True]
    assert len(choose_replies(records[:6], "m")) == 3
    assert choose_replies(records[:2], "other")[0].score is None
    assert choose_replies([], "m") == []


def test_the_variance_within_groups():
    assert measure_within_variance([[0, 1], [1, 1], [0]]) == 0.25
    assert measure_within_variance([[1]]) is None


def test_examples_with_a_good_reply():
    assert measure_solved_share([[0, 1], [1, 1], [0, 0], [0, 0]]) == 0.5
    assert measure_solved_share([[1, 1]]) == 1.0
    assert measure_solved_share([[-1, -0.5], [-1, -1]]) == 0.5


def record(*calls, reward=None):
    made = [
        ModelCall("c", "agent", "m", ModelRequest([]), ModelReply({}, reason, None, prompt, reply), (), 0.0, 1.0)
        for prompt, reply, reason in calls
    ]
    return EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0], calls=made, reward=reward)


def test_lengths_are_those_of_all_calls():
    lengths = measure_lengths([record((10, 4, "stop"), (20, 2, "length")), record((5, 9, "stop"))], 64)
    assert (lengths.longest_prompt, lengths.longest_reply, lengths.longest) == (20, 9, 22)
    assert lengths.mean_reply == 5.0
    assert lengths.cut_share == pytest.approx(1 / 3)
    assert lengths.context == 64
    nothing = measure_lengths([record()], None)
    assert (nothing.longest, nothing.cut_share, nothing.context) == (0, 0.0, None)


def test_replies_that_are_cut_off_harm_only_if_they_earn_less():
    cut, whole = (1, 1, "length"), (1, 1, "stop")
    assert find_cut_harm([record(cut, reward=0.0), record(whole, reward=1.0)])
    assert not find_cut_harm([record(cut, reward=1.0), record(whole, reward=1.0)])
    assert not find_cut_harm([record(cut, reward=0.0), record(cut, reward=1.0)]), "the agent wants one token"
    assert find_cut_harm([record(cut, reward=0.0), record(cut, reward=0.0)]), "nobody has heard the whole answer"
    assert not find_cut_harm([record(whole, reward=0.0)])


def test_the_smallest_improvement_follows_the_spread_of_the_sample():
    """Scores 0 and 1 in each group: variance 0.5, a difference has 1: (1.96 + 1.28) / sqrt(100) = 0.324."""
    found = measure_detectable(GateConfig(), HUNDRED, [[0, 1], [1, 0]])
    assert found.text.startswith("100 confirm examples cannot show less than ±0.10")
    assert found.half_width == pytest.approx(0.0997, abs=1e-3)
    assert found.likely == pytest.approx((1.95996 + 1.28155) * math.sqrt(1 / 100), abs=1e-4)
    four = measure_detectable(GateConfig(num_samples=4, margin=0.1), HUNDRED, [[0, 1], [1, 0]])
    assert four.likely == pytest.approx(found.likely / 2 + 0.1)
    assert measure_detectable(GateConfig(), HUNDRED[:4], [[0, 1]]).likely is None
    assert measure_detectable(GateConfig(), HUNDRED, [[1, 1]]).likely is None
    repeated = measure_detectable(GateConfig(), HUNDRED * 4, [[0, 1], [1, 0]])
    assert (repeated.half_width, repeated.likely) == (found.half_width, found.likely), "400 examples of 100 prompts"


@pytest.mark.parametrize(
    ("moved", "epochs", "lr", "is_weak"),
    [
        (1e-4, 20, 1e-3, True),
        (1e-3, 20, 1e-3, False),
        (1e-4, 300, 1e-3, False),
        (1e-4, 20, 1e-5, False),
        (None, 1, 1e-3, False),
    ],
)
def test_too_few_optimizer_steps_are_named(moved, epochs, lr, is_weak):
    """Four steps moved the log-probs by 0.0001; 80 steps reach 0.002, and 0.2 if the first ones were of a warm-up."""
    optimizer, batch = {"learning_rate": 1e-3}, {"steps_per_job": 4}
    config = FinetuneConfig(
        reward_function={"name": "r"}, num_epochs=epochs, policy={"optimizer": optimizer, "batch": batch}
    )
    rows = [EpochMetrics(0, num_groups=8, job={"num_updates": 4, "lr": lr})]
    found = describe_weak_training(rows, moved, config, 64)
    assert (found is not None) == is_weak
    if found is not None:
        assert found.startswith("about 80 optimizer steps are planned, which cannot move the model: 4 of them changed")


def test_groups_with_different_rewards_are_counted():
    groups = [[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
    assert measure_signal_share(groups) == 0.5
    assert measure_signal_share([*groups, [1]]) == 0.5, "one reply says nothing"
    assert measure_signal_share([]) is None
    assert measure_signal_share([[1]]) is None


def test_a_spread_below_the_configured_one_is_no_signal():
    groups = [[0.0, 0.05], [0.0, 0.1], [0.0, 0.5]]
    assert measure_signal_share(groups, 0.1) == pytest.approx(2 / 3)
    assert predict_signal_share([[0.0, 0.04]] * 20, 8, 0.1) == 0.0
    assert predict_signal_share([[0.0, 0.04]] * 20, 8, 0.01) > 0.9


def test_examples_that_are_all_alike_follow_the_binomial():
    """Half of all replies are right, and every example has one or two or three of four: 1 - 2 * 0.5^G."""
    mixed = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]] * 8
    assert predict_signal_share(mixed, 4) == pytest.approx(1 - 2 * 0.5**4, abs=0.02)
    assert predict_signal_share(mixed, 8) == pytest.approx(1 - 2 * 0.5**8, abs=0.02)


def test_examples_that_are_always_or_never_solved_have_no_signal_at_any_size():
    groups = [[1, 1, 1, 1], [0, 0, 0, 0]] * 10
    assert predict_signal_share(groups, 4) < 0.03
    assert predict_signal_share(groups, 32) < 0.06


def test_a_prediction_at_the_measured_size_is_near_the_measurement():
    groups = [[0, 0, 0, 0]] * 8 + [[1, 0, 0, 0]] * 4 + [[1, 1, 0, 0]] * 4 + [[1, 1, 1, 1]] * 4
    assert predict_signal_share(groups, 4) == pytest.approx(measure_signal_share(groups), abs=0.08)
    sizes = [predict_signal_share(groups, size) for size in (2, 4, 8, 16, 32)]
    assert sizes == sorted(sizes), "larger groups have signal more often"


def test_rewards_of_one_value_are_no_signal_and_none_are_unknown():
    assert predict_signal_share([[0, 0], [0, 0]], 32) == pytest.approx(0.0)
    assert predict_signal_share([], 8) is None


@pytest.mark.parametrize(
    ("a", "b", "size", "num_run"),
    [
        (2, 2, 8, 64),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in ((0.2, 3, 16, 8), (20, 20, 16, 8), (1, 100, 8, 64))
        ),
    ],
)
def test_intervals_cover_what_runs_measure(a, b, size, num_run):
    """Examples with success rates Beta(a, b), 20 of them four times each, and then a run's first epoch and baseline."""
    random, covered = np.random.default_rng(0), np.zeros(2)
    names = [str(n // 4) for n in range(80)]
    for _ in range(150):
        sampled = (random.random((20, 4)) < random.beta(a, b, (20, 1))).astype(float)
        run = random.random((num_run, size)) < random.beta(a, b, (num_run, 1))
        share = predict_signal_share(sampled.tolist(), size)
        low, high = predict_share(share, count_independent(names) * 4 / size, num_run)
        covered[0] += low <= np.mean(run.any(1) & ~run.all(1)) <= high
        base = float(np.mean(random.random(num_run) < random.beta(a, b, num_run)))
        _, low, high = compute_mean_interval(sampled.ravel().tolist(), names=names, num_future=num_run)
        covered[1] += low <= base <= high
    assert (covered / 150 >= 0.93).all(), covered / 150


GOOD = Findings(
    num_examples=20, num_samples=4, missing_share=0.0, missing_reason="", failed_share=0.0, failure_reason="",
    cut_share=0.0, mean_score=0.4, is_binary=True, solved_share=0.7, signal_share=0.5,
    signal_by_size={4: 0.5, 8: 0.7, 16: 0.8, 32: 0.9}, group_size=8, noise_share=0.0, noise=0.0,
)  # fmt: skip
NO_SIGNAL = replace(GOOD, mean_score=0.0, solved_share=0.0, signal_share=0.0, signal_by_size={4: 0.0, 8: 0.0, 32: 0.0})
RARE = replace(NO_SIGNAL, solved_share=0.1, signal_share=0.1, signal_by_size={4: 0.05, 8: 0.1, 32: 0.2})


@pytest.mark.parametrize(
    ("found", "advice", "reason"),
    [
        (GOOD, Advice.GRPO_TRAINING, "about 70% of groups of 8 have rewards that differ"),
        (replace(GOOD, missing_share=0.6, missing_reason="timeout"), Advice.FIX_ENVIRONMENT, "60% of the episodes"),
        (replace(GOOD, noise_share=0.8, noise=0.3), Advice.FIX_REWARD, "standard deviation of 0.30"),
        (replace(GOOD, cut_share=0.4, cuts_hurt=True), Advice.FIX_PROMPT, "40% of the replies are cut off"),
        (replace(GOOD, cut_share=0.4), Advice.GRPO_TRAINING, "about 70%"),
        (replace(GOOD, failed_share=0.6, failure_reason="no JSON"), Advice.FIX_PROMPT, "mostly: no JSON"),
        (replace(GOOD, has_pairs=True), Advice.DPO_ON_PAIRS, "a better and a worse reply"),
        (replace(GOOD, has_labels=True), Advice.KTO_ON_LABELS, "thumbs up or down"),
        (replace(GOOD, mean_score=0.97), Advice.HARDER_EXAMPLES, "97% of the answers right"),
        (replace(GOOD, noise_share=0.3, noise=0.1), Advice.DPO_ON_PAIRS, "30% of that variance is noise"),
        (RARE, Advice.EXPERT_ITERATION, "only 10% of the examples have one in 4"),
        (replace(NO_SIGNAL, has_answers=True), Advice.SFT_FIRST, "all 80 replies of the sample have the score 0"),
        (NO_SIGNAL, Advice.FIX_PROMPT, "all 80 replies of the sample have the score 0"),
        (replace(NO_SIGNAL, solved_share=0.5), Advice.FIX_PROMPT, "always or never solved in 4 replies"),
    ],
)
def test_the_first_rule_that_applies_decides(found, advice, reason):
    advised = recommend(found)
    assert advised.advice is advice
    assert reason in advised.reason
    assert advised.how
    assert str(advised).startswith(str(advice))


@pytest.mark.parametrize(
    ("shares", "configured", "expected", "how"),
    [
        ({4: 0.5, 8: 0.7, 16: 0.8}, 8, 8, "The file already asks for that"),
        ({4: 0.2, 8: 0.4, 16: 0.6, 32: 0.7}, 8, 16, "the file has 8 (of its groups about 40% have signal)"),
        ({4: 0.05, 8: 0.1, 16: 0.2, 32: 0.3}, 8, 32, "to 32"),
        ({4: 0.6, 8: 0.8}, 0, 4, "with num_generations 4"),
    ],
)
def test_the_smallest_group_size_that_suffices_is_chosen(shares, configured, expected, how):
    advised = recommend(replace(GOOD, signal_by_size=shares, group_size=configured))
    assert advised.group_size == expected
    assert how in advised.how
    assert str(advised).startswith(f"GRPO with groups of {expected}: ")


def test_what_the_file_asks_for_is_not_asked_for_again():
    labels = replace(GOOD, has_labels=True)
    assert "`_type: kto`" in recommend(labels).how
    assert recommend(replace(labels, algorithm="kto", group_size=0)).how == "The file already asks for that"


def test_a_margin_for_pairs_is_twice_the_noise():
    advised = recommend(replace(GOOD, noise_share=0.3, noise=0.1))
    assert "min_margin 0.2" in advised.how
