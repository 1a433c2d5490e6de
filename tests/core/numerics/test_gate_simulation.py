"""Simulations of the gate: of 1,000 runs without an effect at most 5 % are promoted, and real effects are found.

Each simulated run uses the public functions for the whole selection: noisy `select` scores of the baseline and six
checkpoints, `choose_best_validation`, then one comparison on `confirm` with fresh episodes of both models, and
`decide`.
"""

from dataclasses import replace

import numpy as np
import pytest

from reinforge.config.schema import GateConfig
from reinforge.evaluation.statistics import compute_detectable_effect, compute_paired_difference
from reinforge.runs.rows import ValidationRow, choose_best_validation
from reinforge.trainer.gate import decide
from reinforge.types.evaluation import EvaluationReport

NUM_CHECKPOINTS = 6
NUM_SELECT = 60


def binary(random, skill_N, effect):
    """Scores of 0 and 1: example n is won with probability skill + effect."""
    return (random.random(skill_N.shape) < np.clip(skill_N + effect, 0, 1)).astype(float)


def continuous(random, skill_N, effect):
    """Continuous scores around the example's difficulty."""
    return skill_N + effect + random.normal(0, 0.25, skill_N.shape)


def lopsided(random, skill_N, effect):
    """Mostly small scores and a few large ones, the hard case for the t interval."""
    return skill_N + effect + random.exponential(0.25, skill_N.shape) ** 2


def report(scores_N, epoch, missing_N):
    scores = {f"example-{n}": score for n, score in enumerate(scores_N.tolist()) if not missing_N[n]}
    return EvaluationReport("confirm", epoch, {"reward": scores}, len(scores_N), {}, "reward")


def simulate(random, draw, num_confirm, *, effect=0.0, spread_of_effects=0.0, missing=0.0):
    skill_S, skill_N = random.beta(2, 2, NUM_SELECT), random.beta(2, 2, num_confirm)
    validations = [
        ValidationRow(epoch, float(draw(random, skill_S, gain).mean()), version=epoch + 1)
        for epoch, gain in enumerate([0.0] + [effect] * NUM_CHECKPOINTS, start=-1)
    ]
    best = choose_best_validation(validations)
    if best.epoch == -1:
        return None
    # training improves some examples and worsens others, with a mean of `effect`
    gains_N = effect + spread_of_effects * random.permutation(np.resize([1.0, -1.0], num_confirm))
    base = report(draw(random, skill_N, 0.0), -1, random.random(num_confirm) < missing)
    tuned = report(draw(random, skill_N, gains_N), best.epoch, random.random(num_confirm) < missing)
    return decide(GateConfig(), "reward", base, tuned)


def promoted_share(num_runs, draw, num_confirm, **effects):
    random = np.random.default_rng([num_confirm, num_runs])
    verdicts = [simulate(random, draw, num_confirm, **effects) for _ in range(num_runs)]
    return sum(verdict is not None and verdict.promoted is True for verdict in verdicts) / num_runs


@pytest.mark.parametrize(
    ("num_runs", "draw", "num_confirm", "effects"),
    [
        (300, binary, 40, {"missing": 0.05}),
        *(
            pytest.param(1000, *case, marks=pytest.mark.slow)
            for case in (
                (binary, 200, {"spread_of_effects": 0.1}),
                (binary, 12, {}),
                (continuous, 12, {}),
                (lopsided, 40, {}),
            )
        ),
    ],
)
def test_at_most_five_percent_of_runs_without_an_effect_are_promoted(num_runs, draw, num_confirm, effects):
    assert promoted_share(num_runs, draw, num_confirm, **effects) <= 0.05


@pytest.mark.slow
def test_power_with_binary_scores_is_ninety_percent_at_eight_points_with_1000_examples():
    """Both models share the example's difficulty: a difference has variance 2 E[p (1 - p)] = 0.4, p ~ Beta(2, 2)."""
    assert compute_detectable_effect(1000, spread=0.4**0.5) == pytest.approx(0.065, abs=1e-3)
    assert promoted_share(200, binary, 1000, effect=0.08) >= 0.9


def test_power_with_continuous_scores_matches_the_formula():
    spread = 0.25 * 2**0.5
    effect = compute_detectable_effect(100, spread)
    assert effect == pytest.approx(0.1146, abs=1e-4)  # (1.960 + 1.282) * 0.3536 / 10
    assert promoted_share(100, continuous, 100, effect=1.1 * effect) >= 0.9


MAX_COPIES, MAX_ROWS = 50, 5000
"""Most rows of one prompt, and of all."""


def draw_repeated(random, num_prompts, mean):
    """Returns the reports of two models that are equally good on average, on prompts that repeat up to 50 times.

    Training makes every other prompt better and the rest worse, by half of what is possible, so that rows of one prompt
    move together.
    """
    copies = random.integers(1, min(MAX_COPIES, MAX_ROWS // num_prompts) + 1, num_prompts)
    skill = random.beta(2 * mean, 2 - 2 * mean, num_prompts)
    moved = skill + random.choice([-0.5, 0.5], num_prompts) * np.minimum(skill, 1 - skill)
    prompts = np.repeat(np.arange(num_prompts), copies)
    clusters = {f"example-{n}": str(prompt) for n, prompt in enumerate(prompts.tolist())}
    scored = np.zeros(prompts.size, dtype=bool)
    arms = (report(binary(random, share[prompts], 0.0), -1, scored) for share in (skill, moved))
    return [replace(arm, clusters=clusters) for arm in arms]


@pytest.mark.slow
@pytest.mark.parametrize(("num_prompts", "mean"), [(10, 0.5), pytest.param(30, 0.1, marks=pytest.mark.fault)])
def test_repeated_prompts_promote_no_more_than_distinct_ones(num_prompts, mean):
    random = np.random.default_rng([num_prompts, int(100 * mean)])
    arms = [draw_repeated(random, num_prompts, mean) for _ in range(400)]
    assert sum(decide(GateConfig(), "reward", *pair).promoted is True for pair in arms) / 400 <= 0.025
    blind = [[replace(arm, clusters={}) for arm in pair] for pair in arms[:200]]
    assert sum(decide(GateConfig(), "reward", *pair).promoted is True for pair in blind) / 200 > 0.06


PROMPTS_AND_MEANS = [(10, 0.5), *((count, mean) for count in (10, 30, 100, 1000) for mean in (0.1, 0.9))]


@pytest.mark.parametrize(
    ("num_prompts", "mean"),
    [
        pytest.param(*case, marks=pytest.mark.fault if n else pytest.mark.slow)
        for n, case in enumerate(PROMPTS_AND_MEANS)
    ],
)
def test_the_interval_covers_the_effect_on_repeated_prompts(num_prompts, mean):
    """Of 2,000 intervals 93.5 to 96.5 % cover it; more where few prompts of rare successes make them discrete."""
    random = np.random.default_rng([num_prompts, int(100 * mean), 1])
    covered = 0
    for _ in range(2000):
        base, tuned = draw_repeated(random, num_prompts, mean)
        found = compute_paired_difference(base.scores["reward"], tuned.scores["reward"], clusters=base.clusters)
        covered += found.ci_low is None or found.ci_low <= 0 <= found.ci_high
    assert 0.935 <= covered / 2000 <= (0.965 if mean == 0.5 or num_prompts >= 100 else 1)
