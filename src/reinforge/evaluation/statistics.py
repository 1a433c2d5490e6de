"""Means with confidence intervals, and the paired comparison of two models on the same examples.

    compute_mean_interval       scores of one model    -> mean and 95 % interval
    compute_paired_difference   scores of two models   -> mean per-example difference, interval and p-value
    compute_unpaired_difference scores of two models   -> difference of the means, on different examples
    compute_detectable_effect   number of examples     -> the smallest improvement that the comparison can find
    compute_half_width          number of examples     -> half the width of the interval of an improvement

The unit is the example: several samples of one example are averaged before they get here, so they never count as
several examples. Where a bound of an interval is unknown it is None, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.types.evaluation import MAX_SCORE, MetricSummary

Scores = NDArray[np.float64]

MAX_P_VALUE = 0.05
"""The test must agree with the interval at this level (two-sided, like the 95 % of the interval)."""
MAX_EXACT_FLIPS = 12
"""Up to this many non-zero differences, all 2^n sign flips are enumerated."""
NUM_RANDOM_FLIPS = 10_000
"""Random sign flips used when there are more."""
_SIGNS_PER_CHUNK = 1 << 18  # small enough for the CPU cache


@dataclass(frozen=True, slots=True)
class Improvement:
    """How much better the tuned model is than the base, over the examples that have a score from both.

    The interval is of 95 %; its bounds are None if the spread is unknown. The p-value is two-sided, of the sign-flip
    test against a mean difference of `margin` (default 0). `method` says how both were computed.
    """

    mean_difference: float
    ci_low: float | None
    ci_high: float | None
    p_value: float
    num_pairs: int
    method: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{format_interval(self.mean_difference, self.ci_low, self.ci_high, signed=True)}"

    def format_p_value(self) -> str:
        return "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"


def compute_mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None, float | None]:
    """Returns the mean and the lower and upper bound of its confidence interval.

    If every value is 0 or 1: the Wilson score interval (Wilson 1927), which stays inside [0, 1] and has a width even
    when all values are equal. Otherwise Student's t: `mean +- t * s / sqrt(n)`; with one value, or with values that are
    all equal, the spread is unknown and both bounds are None (an interval of width 0 would claim certainty).

    Example: [1, 1, 1, 0] -> (0.75, 0.301, 0.954); [0.5] -> (0.5, None, None).
    """
    array = _to_finite_array(values)
    mean = float(array.mean())
    if _is_binary(array):
        return mean, *_wilson_interval(int(array.sum()), array.size, level)
    if array.size < 2 or np.ptp(array) == 0:
        return mean, None, None
    half = _t_half_width(array, level)
    return mean, mean - half, mean + half


def summarize(
    metric: str, scores: dict[str, float], num_examples: int, unscored_reason: str | None = None
) -> MetricSummary:
    """Returns the mean, interval and counts of one metric; examples without a score are left out of `scores`."""
    num_unscored = num_examples - len(scores)
    if num_unscored < 0:
        raise ValueError(f"{metric}: {len(scores)} scores for {num_examples} examples")
    reason = unscored_reason if num_unscored else None
    if not scores:
        return MetricSummary(metric, None, None, None, 0, num_unscored, reason)
    mean, low, high = compute_mean_interval(list(scores.values()))
    return MetricSummary(metric, mean, low, high, len(scores), num_unscored, reason)


def compute_paired_difference(
    base: dict[str, float],
    tuned: dict[str, float],
    margin: float = 0.0,
    level: float = 0.95,
    clusters: Mapping[str, str] | None = None,
) -> Improvement:
    """Returns the mean difference between two models, with interval and p-value.

    Only examples with a score from both models count.

    The interval is Student's t over the per-example differences. If all differences are equal (with clusters: if those
    of every cluster have the same mean), it would have width 0;
    then at most `q = 1 - ((1 - level) / 2)^(1/n)` of all examples behave differently (Clopper-Pearson at n of n), and
    each of those can move the difference to plus or minus the range of the scores (1 for scores of 0 and 1):
    12 examples that all went from 0 to 1 -> difference 1, interval [0.47, 1].

    The p-value is that of the sign-flip permutation test (Fisher 1935): if both models were equally good, each
    difference could just as well have had the other sign. It backs up the t interval when there are few examples, or
    when few of them changed. It is exact if at most 12 differences are not zero (2^12 flips) or if all of those have
    the same size (a binomial); otherwise it uses 10,000 random flips with a fixed seed, so the same scores always give
    the same p-value.

    Args:
        base: Example id -> score of the base model.
        tuned: Example id -> score of the tuned model.
        margin: Difference that the p-value tests against.
        level: Coverage of the interval.
        clusters: Example id -> its cluster, such as the conversation; an example without one is its own. Examples of
            one cluster are not independent: the standard error is that of the sums of the clusters (`sum_clusters`),
            and the test flips the sign of a whole cluster.

    Raises:
        ValueError: No example has a score from both models.
    """
    ids = sorted(base.keys() & tuned.keys())
    if not ids:
        raise ValueError("no example has a score from both models")
    names = [(clusters or {}).get(i, f"example {i}") for i in ids]
    base_scores, tuned_scores = _to_finite_array(base[i] for i in ids), _to_finite_array(tuned[i] for i in ids)
    differences = tuned_scores - base_scores
    mean = float(differences.mean())
    p_value, p_method = _sign_flip_test(sum_clusters(differences - margin, names))
    num_clusters = len(set(names))
    residuals = sum_clusters(differences - mean, names)
    rounding = 1e-12 * max(1.0, float(np.abs(differences).max()))
    low: float | None
    high: float | None
    if num_clusters == 1 < len(ids):
        low, high, method = None, None, "one cluster has no interval"
    elif np.ptp(residuals) > rounding:
        half = _t_half_width(residuals * (num_clusters / len(ids)), level)
        low, high, method = mean - half, mean + half, "paired t interval"
    else:
        low, high = _equal_differences_interval(mean, np.concatenate([base_scores, tuned_scores]), num_clusters, level)
        method = "exact bound for equal differences"
    over = f" over {num_clusters} clusters" if num_clusters < len(ids) else ""
    return Improvement(mean, low, high, p_value, len(ids), f"{method}{over}; {p_method}")


def sum_clusters(values: Scores, names: Sequence[str]) -> Scores:
    """Returns the sum of the values of each cluster, in the order of their first values.

    Example: [1, 2, 3] with names a b a -> [4, 2].
    """
    places: dict[str, int] = {}
    indices = [places.setdefault(name, len(places)) for name in names]
    return np.asarray(np.bincount(indices, weights=values), dtype=np.float64)


def compute_unpaired_difference(base: Sequence[float], tuned: Sequence[float]) -> Improvement:
    """Returns the difference of the means of two models that ran on different examples; `num_pairs` is 0.

    The interval is built from those of the two means, `[l, u]` of `compute_mean_interval` (Zou and Donner 2008; for
    scores of 0 and 1 it is method 10 of Newcombe 1998):

        low  = difference - sqrt((tuned - l_tuned)^2 + (u_base - base)^2)
        high = difference + sqrt((u_tuned - tuned)^2 + (base - l_base)^2)

    The p-value is that of a permutation test: if both models were equally good, each score could just as well have
    been the other model's. It uses 10,000 random divisions with a fixed seed.

    Example: [1, 0, 0, 0] and [1, 1, 1, 0] -> difference 0.5, interval [-0.135, 0.789].
    """
    (mean_base, low_base, high_base), (mean, low, high) = map(compute_mean_interval, (base, tuned))
    difference = mean - mean_base
    ci_low = ci_high = None
    if low is not None and high is not None and low_base is not None and high_base is not None:
        ci_low = difference - math.hypot(mean - low, high_base - mean_base)
        ci_high = difference + math.hypot(high - mean, mean_base - low_base)
    p_value = _permutation_test(_to_finite_array(base), _to_finite_array(tuned))
    method = f"unpaired interval from those of the two means; permutation test, {NUM_RANDOM_FLIPS:,} random divisions"
    return Improvement(difference, ci_low, ci_high, p_value, 0, method)


def compute_detectable_effect(num_pairs: int, spread: float) -> float:
    """Returns the smallest true mean difference whose 95 % interval lies above 0 with probability 0.9.

    `(z_0.975 + z_0.9) * spread / sqrt(n)`, with the standard deviation `spread` of an example's difference.
    With scores of 0 and 1, independent samples from both models and a success rate near 1/2 it is at most 0.71:
    1000 examples -> 0.073, 100 -> 0.23.
    """
    normal = NormalDist()
    return (normal.inv_cdf((1 + 0.95) / 2) + normal.inv_cdf(0.9)) * spread / math.sqrt(num_pairs)


def compute_half_width(num_pairs: int, num_samples: int = 1) -> float:
    """Returns half the width that the interval of an improvement will have: a smaller improvement cannot be shown.

    `t_(n-1) * s / sqrt(n)` with `s = 0.5 / sqrt(num_samples) * sqrt(n / (n-1))`. Assumption: scores of 0 and 1 with a
    small improvement, where the two models score an example differently one time in four: such a difference has the
    variance 1/4, and the mean of `num_samples` of them 1/4 / num_samples. Where the models differ more often, the
    interval is wider. With 20 examples -> 0.240, 100 -> 0.100, 20 with 4 samples each -> 0.120.
    """
    return t_quantile(num_pairs - 1, 0.95) * 0.5 / math.sqrt(num_samples * (num_pairs - 1))


def format_interval(
    mean: float | None, low: float | None = None, high: float | None = None, *, signed: bool = False
) -> str:
    """Returns `0.412 [0.380, 0.445]`, `0.412 (interval unknown)` or `unknown`; `signed` adds a plus sign."""
    if mean is None:
        return "unknown"
    style = "+.3f" if signed else ".3f"
    if low is None or high is None:
        return f"{mean:{style}} (interval unknown)"
    return f"{mean:{style}} [{low:{style}}, {high:{style}}]"


def _to_finite_array(values: Iterable[float]) -> Scores:
    array = np.asarray(list(values), dtype=np.float64)
    if array.size == 0 or not (np.abs(array) <= MAX_SCORE).all():
        what = f"expected one or more finite scores of at most {MAX_SCORE:g}"
        raise ValueError(f"{what}; leave out examples without a score")
    return array


def _is_binary(values: Scores) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _wilson_interval(successes: int, n: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = successes / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else center - half
    high = 1.0 if successes == n else center + half
    return low, high


def _t_half_width(values: Scores, level: float) -> float:
    return t_quantile(values.size - 1, level) * float(values.std(ddof=1)) / math.sqrt(values.size)


def t_quantile(df: int, level: float) -> float:
    """Returns the t for which `P(|T| < t) = level`, where T follows Student's t with `df` degrees of freedom.

    For integer `df`, `P(|T| < t)` is a finite sum in `theta = atan(t / sqrt(df))` (Abramowitz & Stegun 1964, 26.7.3 and
    26.7.4):

        df even: sin(theta) * (1 + 1/2 cos^2(theta) + 1*3/(2*4) cos^4(theta) + ..., df/2 terms)
        df odd:  2/pi * (theta + sin(theta) cos(theta) * (1 + 2/3 cos^2(theta) + 2*4/(3*5) cos^4(theta) + ...,
                 (df - 1)/2 terms))

    All terms are positive, so nothing cancels. The sum is concave in theta and the normal quantile is smaller than the
    t quantile, so Newton's method approaches the root from below until rounding stops it.

    Example: `t_quantile(2, 0.95)` -> 4.3027.
    """
    odd = df % 2
    steps = np.arange(1, df // 2)
    factors = 2 * steps / (2 * steps + 1) if odd else (2 * steps - 1) / (2 * steps)
    slope_at_0 = 2 / math.sqrt(math.pi) * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2))
    theta = math.atan(NormalDist().inv_cdf((1 + level) / 2) / math.sqrt(df))
    while True:
        cos = math.cos(theta)
        total = math.sin(theta) * (1 + float(np.cumprod(factors * cos * cos).sum()))
        if odd:
            total = 2 / math.pi * (theta + (cos * total if df > 1 else 0.0))
        step = (level - total) / (slope_at_0 * cos ** (df - 1))
        if not step > 1e-15:
            return math.sqrt(df) * math.tan(theta)
        theta += step


def _equal_differences_interval(
    difference: float, scores: Scores, n: int, level: float
) -> tuple[float | None, float | None]:
    """Returns the interval for n equal differences; None if the scores are all equal too."""
    score_range = 1.0 if _is_binary(scores) else float(np.ptp(scores))
    if score_range == 0:
        return None, None
    q = 1 - ((1 - level) / 2) ** (1 / n)
    return difference * (1 - q) - score_range * q, difference * (1 - q) + score_range * q


def _sign_flip_test(differences: Scores) -> tuple[float, str]:
    """Returns the two-sided p-value and how it was computed; zeros are left out, since a flip does not change them."""
    sizes = np.abs(differences[np.abs(differences) > 1e-12])
    n = sizes.size
    if n == 0:
        return 1.0, "sign-flip test, exact"
    observed = abs(float(differences.sum())) - 1e-9 * float(sizes.sum())  # so that rounding cannot break a tie
    if n <= MAX_EXACT_FLIPS:
        signs = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((2 * signs - 1) @ sizes) >= observed).mean()), "sign-flip test, exact"
    if np.ptp(sizes) <= 1e-12:
        fewer = round((n - abs(float(differences.sum())) / float(sizes[0])) / 2)
        return min(1.0, 2 * fair_coin_cdf(fewer, n)), "sign-flip test, exact"
    random = np.random.default_rng(0)
    num_extreme = 0
    rows = max(1, _SIGNS_PER_CHUNK // n)
    for start in range(0, NUM_RANDOM_FLIPS, rows):
        count = min(rows, NUM_RANDOM_FLIPS - start)
        coins = np.unpackbits(random.integers(0, 256, (count, (n + 7) // 8), dtype=np.uint8), axis=1, count=n)
        num_extreme += int((np.abs(2 * (coins.astype(np.float64) @ sizes) - sizes.sum()) >= observed).sum())
    return (1 + num_extreme) / (1 + NUM_RANDOM_FLIPS), f"sign-flip test, {NUM_RANDOM_FLIPS:,} random flips"


def _permutation_test(base: Scores, tuned: Scores) -> float:
    scores = np.concatenate([base, tuned])
    total, n = float(scores.sum()), tuned.size
    tolerance = 1e-9 * max(1.0, float(np.abs(scores).max()))  # so that rounding cannot break a tie
    observed = abs(float(tuned.mean()) - float(base.mean())) - tolerance
    random, num_extreme = np.random.default_rng(0), 0
    for _ in range(NUM_RANDOM_FLIPS):
        chosen = float(random.permutation(scores)[:n].sum())
        num_extreme += abs(chosen / n - (total - chosen) / base.size) >= observed
    return (1 + num_extreme) / (1 + NUM_RANDOM_FLIPS)


def fair_coin_cdf(k: int, n: int) -> float:
    """Returns the probability of at most `k` heads in `n` tosses of a fair coin.

    `sum_(i<=k) C(n, i) / 2^n`: the last term in exact integers, the others from it by `C(n, i-1) = C(n, i) i/(n-i+1)`.

    Example: `fair_coin_cdf(1, 3)` -> (3 + 1) / 8 = 0.5.
    """
    below = np.arange(k, 0, -1)
    return math.comb(n, k) / (1 << n) * (1 + float(np.cumprod(below / (n - below + 1)).sum()))
