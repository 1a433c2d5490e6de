"""Figures with intervals, and whether one arm of an evaluation is better than the other.

    mean_interval       scores of one arm        -> mean and 95 % interval
    paired_difference   scores of the two arms   -> mean difference, interval and p-value, example by example
    detectable_effect   number of examples       -> the smallest improvement that a comparison will find

The unit is the example: several draws of one example are averaged before they come here, so draws never pass for
examples. An unknown end of an interval is None, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.types.evaluation import MetricSummary

Scores = NDArray[np.float64]

MAX_EXACT_FLIPS = 12
"""With this many non-zero differences or fewer, all 2^n sign flips are enumerated."""
NUM_RANDOM_FLIPS = 10_000
"""Flips drawn where there are more."""
_FLIPS_AT_ONCE = 1 << 18  # signs held in memory, small enough for the cache


@dataclass(frozen=True, slots=True)
class Improvement:
    """How much better the tuned arm is than the base, over the examples scored in both.

    Attributes:
        mean_difference: Mean of tuned minus base.
        ci_low, ci_high: Ends of its 95 % interval; None where nothing is known of the spread.
        p_value: Two-sided, of the sign-flip test that the mean difference is `margin` (0 unless asked otherwise).
        num_pairs: Examples scored in both arms.
        method: How the interval and the p-value were computed.
    """

    mean_difference: float
    ci_low: float | None
    ci_high: float | None
    p_value: float
    num_pairs: int
    method: str

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as a JSON-ready dict."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{format_interval(self.mean_difference, self.ci_low, self.ci_high, signed=True)}"


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None, float | None]:
    """Returns mean, low and high of the mean's confidence interval.

    Where every value is 0 or 1: the Wilson score interval (Wilson 1927), which stays inside [0, 1] and has width even
    when all values are equal. Otherwise Student's t: `mean +- t * s / sqrt(n)`; with one value, or values that are all
    equal, nothing is known of the spread and both ends are None (an interval of width 0 would claim certainty).

    Example: `mean_interval([1, 1, 1, 0])` -> `(0.75, 0.301, 0.954)`; `mean_interval([0.5])` -> `(0.5, None, None)`.

    Args:
        values: Scores, one an example; at least one.
        level: Coverage of the interval.

    Raises:
        ValueError: No values, or one that is not finite.
    """
    array = _finite(values)
    mean = float(array.mean())
    if _is_binary(array):
        return mean, *_wilson(int(array.sum()), array.size, level)
    if array.size < 2 or np.ptp(array) == 0:
        return mean, None, None
    half = _t_half_width(array, level)
    return mean, mean - half, mean + half


def summarize(metric: str, scores: dict[str, float], num_examples: int) -> MetricSummary:
    """Returns the figure of one metric.

    Args:
        metric: Name of the evaluator.
        scores: Example id -> score; missing examples are absent.
        num_examples: Examples that were asked for, scored or not.

    Raises:
        ValueError: There are more scores than examples, or one is not finite.
    """
    num_unscored = num_examples - len(scores)
    if num_unscored < 0:
        raise ValueError(f"{metric}: {len(scores)} scores for {num_examples} examples")
    if not scores:
        return MetricSummary(metric, None, None, None, 0, num_unscored)
    mean, low, high = mean_interval(list(scores.values()))
    return MetricSummary(metric, mean, low, high, len(scores), num_unscored)


def paired_difference(
    base: dict[str, float], tuned: dict[str, float], margin: float = 0.0, level: float = 0.95
) -> Improvement:
    """Returns the difference of two arms over the examples scored in both; what one misses is dropped for both.

    The interval is Student's t over per-example differences. Where all differences are equal it would have width 0;
    then at most `q = 1 - ((1 - level) / 2)^(1/n)` of all examples behave otherwise (Clopper-Pearson at n of n), and
    each of those can move the difference to plus or minus the range of the scores (1 for scores of 0 and 1):
    12 examples that all went from 0 to 1 -> difference 1, interval [0.47, 1].

    The p-value is of the sign-flip permutation test (Fisher 1935): if tuned and base were equal, each difference could
    as well have had the other sign. It guards the t interval where examples are few or few of them changed. Exact where
    at most 12 differences are not zero (2^12 flips) or all have one size (a binomial); else 10,000 flips drawn with a
    fixed seed, so the same scores always give the same value.

    Args:
        base: Example id -> score of the base.
        tuned: The same of the tuned model.
        margin: Difference that the p-value tests against.
        level: Coverage of the interval.

    Raises:
        ValueError: No example is scored in both arms.
    """
    ids = sorted(base.keys() & tuned.keys())
    if not ids:
        raise ValueError("no example is scored in both arms")
    base_scores, tuned_scores = _finite([base[i] for i in ids]), _finite([tuned[i] for i in ids])
    differences = tuned_scores - base_scores
    mean = float(differences.mean())
    p_value, p_method = _sign_flip(differences - margin)
    low: float | None
    high: float | None
    if np.ptp(differences) > 1e-12:
        half = _t_half_width(differences, level)
        low, high, method = mean - half, mean + half, "paired t interval"
    else:
        low, high = _no_spread_interval(mean, np.concatenate([base_scores, tuned_scores]), len(ids), level)
        method = "exact bound for equal differences"
    return Improvement(mean, low, high, p_value, len(ids), f"{method}; {p_method}")


def detectable_effect(num_pairs: int, spread: float, power: float = 0.9, level: float = 0.95) -> float:
    """Returns the smallest true mean difference whose interval lies above 0 with probability `power`.

    `(z_(1+level)/2 + z_power) * spread / sqrt(n)`; with scores of 0 and 1, arms drawn independently and a success rate
    near 1/2, the spread of a difference is at most 0.71: 1000 examples -> 0.073, 100 -> 0.23.

    Args:
        num_pairs: Examples scored in both arms.
        spread: Standard deviation of one example's difference between the arms.
        power: Probability of finding the effect.
        level: Coverage of the interval.
    """
    from scipy.special import ndtri

    return float((ndtri((1 + level) / 2) + ndtri(power)) * spread / math.sqrt(num_pairs))


def format_interval(
    mean: float | None, low: float | None = None, high: float | None = None, *, signed: bool = False
) -> str:
    """Returns `0.412 [0.380, 0.445]`, `0.412 (interval unknown)` or `unknown`.

    Args:
        mean: The figure; None: unknown.
        low: Lower end of its interval.
        high: Upper end.
        signed: Write a plus before positive numbers, for differences.
    """
    if mean is None:
        return "unknown"
    style = "+.3f" if signed else ".3f"
    if low is None or high is None:
        return f"{mean:{style}} (interval unknown)"
    return f"{mean:{style}} [{low:{style}}, {high:{style}}]"


def _finite(values: Iterable[float]) -> Scores:
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        raise ValueError("scores must be finite numbers, at least one; leave missing ones out")
    return array


def _is_binary(values: Scores) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _wilson(successes: int, n: int, level: float) -> tuple[float, float]:
    from scipy.special import ndtri

    z = float(ndtri((1 + level) / 2))
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def _t_half_width(values: Scores, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(values.size - 1, (1 + level) / 2) * values.std(ddof=1) / math.sqrt(values.size))


def _no_spread_interval(difference: float, scores: Scores, n: int, level: float) -> tuple[float | None, float | None]:
    """Returns the interval of a difference that every pair shares; None where the scores show no range either."""
    score_range = 1.0 if _is_binary(scores) else float(np.ptp(scores))
    if score_range == 0:
        return None, None
    other = 1 - ((1 - level) / 2) ** (1 / n)
    return difference * (1 - other) - score_range * other, difference * (1 - other) + score_range * other


def _sign_flip(differences: Scores) -> tuple[float, str]:
    """Returns the two-sided p-value and how it was computed; zeros are left out, since no flip changes them."""
    sizes = np.abs(differences[np.abs(differences) > 1e-12])
    n = sizes.size
    if n == 0:
        return 1.0, "sign-flip test, exact"
    observed = abs(float(differences.sum())) - 1e-9 * float(sizes.sum())  # equal sums count, whatever the rounding
    if n <= MAX_EXACT_FLIPS:
        signs = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((2 * signs - 1) @ sizes) >= observed).mean()), "sign-flip test, exact"
    if np.ptp(sizes) <= 1e-12:
        from scipy.special import bdtr

        fewer = round((n - abs(float(differences.sum())) / float(sizes[0])) / 2)
        return min(1.0, 2 * float(bdtr(fewer, n, 0.5))), "sign-flip test, exact"
    random = np.random.default_rng(0)
    as_far = 0
    rows = max(1, _FLIPS_AT_ONCE // n)
    for start in range(0, NUM_RANDOM_FLIPS, rows):
        count = min(rows, NUM_RANDOM_FLIPS - start)
        coins = np.unpackbits(random.integers(0, 256, (count, (n + 7) // 8), dtype=np.uint8), axis=1, count=n)
        as_far += int((np.abs(2 * (coins.astype(np.float64) @ sizes) - sizes.sum()) >= observed).sum())
    return (1 + as_far) / (1 + NUM_RANDOM_FLIPS), f"sign-flip test, {NUM_RANDOM_FLIPS:,} random flips"
