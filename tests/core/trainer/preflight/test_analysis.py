"""Noise, lengths and the smallest improvement, from sampled episodes."""

import math

import pytest

from reinforge.config.schema import FinetuneConfig, GateConfig
from reinforge.runs.rows import EpochMetrics
from reinforge.trainer.preflight.analysis import (
    describe_weak_training,
    find_cut_harm,
    measure_detectable,
    measure_lengths,
    measure_noise,
    measure_solved_share,
    measure_within_variance,
)
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
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
