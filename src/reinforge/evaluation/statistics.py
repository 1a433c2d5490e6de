"""Means with confidence intervals, and the paired comparison of two models on the same examples.

    compute_mean_interval       scores of one model    -> mean and 95 % interval
    compute_paired_difference   scores of two models   -> mean per-example difference, interval and p-value
    compute_unpaired_difference scores of two models   -> difference of the means, on different examples
    compute_detectable_effect   number of examples     -> the smallest improvement that the comparison can find
    count_needed_pairs          an improvement         -> the number of examples that can show one of its size
    compute_half_width          number of examples     -> half the width of the interval of an improvement

The unit is the example: several samples of one example are averaged before they get here, so they never count as
several examples. Examples that share a prompt or a conversation are not independent; they form a cluster, and every
interval and test below counts clusters. Where a bound of an interval is unknown it is None, never a number.
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

MAX_P_VALUE = 0.05  # the test must agree with the interval at this level (two-sided, like the 95 % of the interval)
MAX_EXACT_FLIPS = 12  # up to this many non-zero differences, all 2^n sign flips are enumerated
NUM_RANDOM_FLIPS = 10_000  # random sign flips used when there are more
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
    num_clusters: int | None = None  # clusters that the pairs are of; None: not known

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{format_interval(self.mean_difference, self.ci_low, self.ci_high, signed=True)}"

    def format_p_value(self) -> str:
        return "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.3f}"


def compute_mean_interval(
    values: Sequence[float], level: float = 0.95, names: Sequence[str] | None = None, num_future: float | None = None
) -> tuple[float, float | None, float | None]:
    """Returns the mean and the lower and upper bound of its confidence interval.

    If every value is 0 or 1: the Wilson score interval (Wilson 1927), which stays inside [0, 1] and has a width even
    when all values are equal. Otherwise Student's t: `mean +- t * standard error` (`compute_clustered_error`); with one
    cluster, or with clusters of equal means, the spread is unknown and both bounds are None (an interval of width 0
    would claim certainty).

    Where values of 0 and 1 share clusters, Wilson's n is the effective number of values `mean (1 - mean) / se^2`, times
    `(z / t)^2` for the degrees of freedom (Korn and Graubard 1998, with Wilson's interval instead of Clopper and
    Pearson's), at most the number of values; where the clusters have equal means, that of `count_independent`.

    Example: [1, 1, 1, 0] -> (0.75, 0.301, 0.954); [0.5] -> (0.5, None, None).

    Args:
        names: The cluster of each value; None: each is its own.
        num_future: The interval is for the mean of this many further independent values; None: for the true mean.
    """
    array = _to_finite_array(values)
    mean, size = float(array.mean()), array.size
    names = names if names is not None else [str(index) for index in range(size)]
    has_spread = len(set(names)) > 1 and not _are_equal(sum_clusters(array - mean, names), array)
    error, df = compute_clustered_error(array - mean, names) if has_spread else (0.0, 1.0)
    if _is_binary(array):
        effective = count_independent(names)
        if has_spread and effective < size:
            z_over_t = NormalDist().inv_cdf((1 + level) / 2) / t_quantile(df, level)
            effective = min(size, mean * (1 - mean) / error**2 * z_over_t**2)
        if num_future is not None:
            return mean, *predict_share(mean, effective, num_future, level)
        return mean, *compute_wilson_interval(mean, effective, level)
    if not has_spread:
        return mean, None, None
    error = error if num_future is None else math.hypot(error, float(array.std(ddof=1)) / math.sqrt(num_future))
    half = t_quantile(df, level) * error
    return mean, mean - half, mean + half


def summarize(
    metric: str,
    scores: Mapping[str, float],
    num_examples: int,
    unscored_reason: str | None = None,
    clusters: Mapping[str, str] | None = None,
) -> MetricSummary:
    """Returns the mean, interval and counts of one metric; examples without a score are left out of `scores`.

    Args:
        clusters: Example id -> its cluster; an example without one is its own.
    """
    num_unscored = num_examples - len(scores)
    if num_unscored < 0:
        raise ValueError(f"{metric}: {len(scores)} scores for {num_examples} examples")
    reason = unscored_reason if num_unscored else None
    if not scores:
        return MetricSummary(metric, None, None, None, 0, num_unscored, reason)
    names = list_names(scores, clusters)
    mean, low, high = compute_mean_interval(list(scores.values()), names=names)
    return MetricSummary(metric, mean, low, high, len(scores), num_unscored, reason, len(set(names)))


def compute_paired_difference(
    base: dict[str, float],
    tuned: dict[str, float],
    margin: float = 0.0,
    level: float = 0.95,
    clusters: Mapping[str, str] | None = None,
) -> Improvement:
    """Returns the mean difference between two models, with interval and p-value.

    Only examples with a score from both models count.

    The interval is Student's t over the per-example differences, cut at -1 and 1 for scores of 0 and 1. If all
    differences are equal (with clusters: if those of every cluster have the same mean), it would have width 0; then
    at most `q = 1 - ((1 - level) / 2)^(1/n)` of all examples behave differently (Clopper-Pearson at n of n), and each
    of those can move the difference to plus or minus the range of the scores (1 for scores of 0 and 1):
    12 examples that all went from 0 to 1 -> difference 1, interval [0.47, 1].

    The p-value is that of the sign-flip permutation test (Fisher 1935): if both models were equally good, each
    difference could just as well have had the other sign. It backs up the t interval when there are few examples, or
    when few of them changed. It is exact if at most 12 differences are not zero (2^12 flips) or if all of those have
    the same size (a binomial); otherwise it uses 10,000 random flips with a fixed seed, so the same scores always give
    the same p-value.

    Args:
        clusters: Example id -> its cluster, such as the conversation; an example without one is its own. Examples of
            one cluster are not independent: the standard error is that of the sums of the clusters
            (`compute_clustered_error`), and the test flips the sign of a whole cluster.
    """
    ids = sorted(base.keys() & tuned.keys())
    if not ids:
        raise ValueError("no example has a score from both models")
    names = list_names(ids, clusters)
    base_scores, tuned_scores = _to_finite_array(base[i] for i in ids), _to_finite_array(tuned[i] for i in ids)
    differences = tuned_scores - base_scores
    mean = float(differences.mean())
    p_value, p_method = _sign_flip_test(sum_clusters(differences - margin, names))
    num_clusters, scores = len(set(names)), np.concatenate([base_scores, tuned_scores])
    low: float | None
    high: float | None
    if num_clusters == 1 < len(ids):
        low, high, method = None, None, "one cluster has no interval"
    elif _are_equal(sum_clusters(differences - mean, names), differences):
        low, high = _equal_differences_interval(mean, scores, num_clusters, level)
        method = "exact bound for equal differences"
    else:
        error, df = compute_clustered_error(differences - mean, names)
        half = t_quantile(df, level) * error
        most = 1.0 if _is_binary(scores) else math.inf
        low, high, method = max(mean - half, -most), min(mean + half, most), "paired t interval"
    over = f" over {num_clusters} clusters" if num_clusters < len(ids) else ""
    return Improvement(mean, low, high, p_value, len(ids), f"{method}{over}; {p_method}", num_clusters)


def list_names(ids: Iterable[str], clusters: Mapping[str, str] | None) -> list[str]:
    """Returns the cluster of each example; one without a cluster is its own."""
    return [(clusters or {}).get(id_, f"example {id_}") for id_ in ids]


def count_independent(names: Sequence[str]) -> float:
    """Returns the number of independent values with the spread of values in clusters: `n^2 / sum of n_c^2` (Kish 1965).

    Example: names a a b b -> 2; a a a b -> 16 / 10 = 1.6.
    """
    sizes = sum_clusters(np.ones(len(names)), names)
    return float(len(names) ** 2 / (sizes**2).sum())


def compute_clustered_error(residuals: Scores, names: Sequence[str]) -> tuple[float, float]:
    """Returns the standard error of a mean of values in clusters, and its degrees of freedom.

    With the sum `s_c` of the residuals and the size `n_c` of each cluster, of n values in all:

        se^2 = sum of s_c^2 / (1 - n_c / n) / n^2
        df   = n^2 / (sum of (d_c^2 - 2 d_c e_c / n) + (sum of e_c)^2 / n^2),  d_c = n_c / (1 - n_c / n),  e_c = n_c d_c

    (Bell and McCaffrey 2002, for the model that has only a mean; the degrees of freedom are Satterthwaite's). Where
    each value is its own cluster these are `s / sqrt(n)` and n - 1.

    Example: residuals 0.5, 0.5, -0.5, -0.5 in clusters a a b c -> sums 1, -0.5, -0.5; se 0.408, df 1.8.
    """
    n, sums = residuals.size, sum_clusters(residuals, names)
    sizes = sum_clusters(np.ones(n), names)
    rest = 1 - sizes / n
    scaled = sizes / rest
    squares = sizes * scaled
    spread = float((scaled**2 - 2 * scaled * squares / n).sum() + squares.sum() ** 2 / n**2)
    return math.sqrt(float((sums**2 / rest).sum())) / n, max(1.0, n**2 / spread)


def sum_clusters(values: Scores, names: Sequence[str]) -> Scores:
    """Returns the sum of the values of each cluster, in the order of their first values.

    Example: [1, 2, 3] with names a b a -> [4, 2].
    """
    places: dict[str, int] = {}
    indices = [places.setdefault(name, len(places)) for name in names]
    return np.asarray(np.bincount(indices, weights=values), dtype=np.float64)


def compute_unpaired_difference(
    base: Mapping[str, float], tuned: Mapping[str, float], clusters: Mapping[str, str] | None = None
) -> Improvement:
    """Returns the difference of the means of two models that ran on different examples; `num_pairs` is 0.

    The interval is built from those of the two means, `[l, u]` of `compute_mean_interval` (Zou and Donner 2008; for
    scores of 0 and 1 it is method 10 of Newcombe 1998):

        low  = difference - sqrt((tuned - l_tuned)^2 + (u_base - base)^2)
        high = difference + sqrt((u_tuned - tuned)^2 + (base - l_base)^2)

    The p-value is that of a permutation test: if both models were equally good, each cluster of scores could just as
    well have been the other model's. It uses 10,000 random divisions with a fixed seed.

    Example: scores 1, 0, 0, 0 and 1, 1, 1, 0 -> difference 0.5, interval [-0.135, 0.789].
    """
    arms = [(_to_finite_array(arm.values()), list_names(arm, clusters)) for arm in (base, tuned)]
    (mean_base, low_base, high_base), (mean, low, high) = (
        compute_mean_interval(scores.tolist(), names=names) for scores, names in arms
    )
    difference = mean - mean_base
    ci_low = ci_high = None
    if low is not None and high is not None and low_base is not None and high_base is not None:
        ci_low = difference - math.hypot(mean - low, high_base - mean_base)
        ci_high = difference + math.hypot(high - mean, mean_base - low_base)
    method = f"unpaired interval from those of the two means; permutation test, {NUM_RANDOM_FLIPS:,} random divisions"
    num_clusters = sum(len(set(names)) for _, names in arms)
    return Improvement(difference, ci_low, ci_high, _permutation_test(arms), 0, method, num_clusters)


def compute_detectable_effect(num_pairs: float, spread: float, power: float = 0.9, level: float = 0.95) -> float:
    """Returns the smallest true mean difference whose interval lies above 0 with a probability of `power`.

    `(z_0.975 + z_0.9) * spread / sqrt(n)`, with the defaults and the standard deviation `spread` of an example's
    difference. With scores of 0 and 1, independent samples from both models and a success rate near 1/2 it is at most
    0.71: 1000 examples -> 0.073, 100 -> 0.23.
    """
    normal = NormalDist()
    return (normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(power)) * spread / math.sqrt(num_pairs)


def count_needed_pairs(
    change: Improvement, margin: float = 0.0, *, power: float = 0.9, level: float = 0.95
) -> int | None:
    """Returns the number of examples with which an improvement of this size is above the margin, as
    `compute_detectable_effect` counts; None: it is not above the margin, or its interval is unknown.

    Example: 100 examples, +0.1 with an interval of half width 0.198 (standard error 0.1) -> 100 * 3.24^2 = 1051.
    """
    effect, num_clusters = change.mean_difference - margin, change.num_clusters or change.num_pairs
    if effect <= 0 or change.ci_high is None:
        return None
    error = (change.ci_high - change.mean_difference) / t_quantile(max(1.0, num_clusters - 1), level)
    spread = error * math.sqrt(change.num_pairs)
    detectable = compute_detectable_effect(change.num_pairs, spread, power, level)
    return math.ceil(change.num_pairs * (detectable / effect) ** 2)


def compute_half_width(num_pairs: float, num_samples: int = 1) -> float:
    """Returns half the width that the interval of an improvement will have: a smaller improvement cannot be shown.

    `t_(n-1) * s / sqrt(n)` with `s = 0.5 / sqrt(num_samples) * sqrt(n / (n-1))`. Assumption: scores of 0 and 1 with a
    small improvement, where the two models score an example differently one time in four: such a difference has the
    variance 1/4, and the mean of `num_samples` of them 1/4 / num_samples. Where the models differ more often, the
    interval is wider. With 20 examples -> 0.240, 100 -> 0.100, 20 with 4 samples each -> 0.120.

    Args:
        num_pairs: The number of independent examples (`count_independent`), above 1.
    """
    return t_quantile(max(1.0, num_pairs - 1), 0.95) * 0.5 / math.sqrt(num_samples * (num_pairs - 1))


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


def _are_equal(sums: Scores, values: Scores) -> bool:
    """Returns True if sums of residuals differ by no more than rounding."""
    return bool(np.ptp(sums) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def predict_share(share: float, n: float, num_future: float, level: float = 0.95) -> tuple[float, float]:
    """Returns the interval for the share of hits among further values, after the share among `n` independent ones.

    With the prior Beta(1/2, 1/2) (Jeffreys) the number of hits follows the beta-binomial distribution with
    `a = n share + 1/2` and `b = n (1 - share) + 1/2`; the interval is between its quantiles.

    Example: 10 hits of 20, and 20 further values -> [0.2, 0.8]; 0 of 20 -> [0, 0.15].
    """
    m, a, b = max(1, round(num_future)), n * share + 0.5, n * (1 - share) + 0.5
    log_ratios = [math.log((m - k) * (a + k) / ((k + 1) * (b + m - k - 1))) for k in range(m)]
    logs = np.concatenate([[0.0], np.cumsum(log_ratios)])
    below = np.cumsum(np.exp(logs - logs.max()))
    low, high = np.searchsorted(below / below[-1], [(1 - level) / 2, (1 + level) / 2])
    return float(low) / m, float(high) / m


def compute_wilson_interval(share: float, n: float, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if share == 0 else center - half
    high = 1.0 if share == 1 else center + half
    return low, high


def t_quantile(df: float, level: float) -> float:
    """Returns the t for which `P(|T| < t) = level`, where T follows Student's t with `df` degrees of freedom.

    For integer `df`, `P(|T| < t)` is a finite sum in `theta = atan(t / sqrt(df))` (Abramowitz & Stegun 1964, 26.7.3 and
    26.7.4):

        df even: sin(theta) * (1 + 1/2 cos^2(theta) + 1*3/(2*4) cos^4(theta) + ..., df/2 terms)
        df odd:  2/pi * (theta + sin(theta) cos(theta) * (1 + 2/3 cos^2(theta) + 2*4/(3*5) cos^4(theta) + ...,
                 (df - 1)/2 terms))

    All terms are positive, so nothing cancels. The sum is concave in theta and the normal quantile is smaller than the
    t quantile, so Newton's method approaches the root from below until rounding stops it.

    Between whole numbers its logarithm is interpolated over `1 / df` (within 3 %; above df 5 within 0.1 %).

    Example: `t_quantile(2, 0.95)` -> 4.3027.
    """
    whole = math.floor(df + 1e-9)
    if df - whole > 1e-9:
        share = (1 / df - 1 / (whole + 1)) / (1 / whole - 1 / (whole + 1))
        return float(t_quantile(whole, level) ** share * t_quantile(whole + 1, level) ** (1 - share))
    df = whole
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


def _permutation_test(arms: Sequence[tuple[Scores, list[str]]]) -> float:
    sums = np.concatenate([sum_clusters(scores, names) for scores, names in arms])
    sizes = np.concatenate([sum_clusters(np.ones(scores.size), names) for scores, names in arms])
    total, n, first = float(sums.sum()), float(sizes.sum()), len(set(arms[0][1]))

    def measure(order: NDArray[np.int64]) -> float:
        chosen, count = float(sums[order[:first]].sum()), float(sizes[order[:first]].sum())
        return abs(chosen / count - (total - chosen) / (n - count))

    tolerance = 1e-9 * max(1.0, float(np.abs(sums / sizes).max()))  # so that rounding cannot break a tie
    observed = measure(np.arange(sums.size)) - tolerance
    random = np.random.default_rng(0)
    num_extreme = sum(measure(random.permutation(sums.size)) >= observed for _ in range(NUM_RANDOM_FLIPS))
    return (1 + num_extreme) / (1 + NUM_RANDOM_FLIPS)


def fair_coin_cdf(k: int, n: int) -> float:
    """Returns the probability of at most `k` heads in `n` tosses of a fair coin.

    `sum_(i<=k) C(n, i) / 2^n`: the last term in exact integers, the others from it by `C(n, i-1) = C(n, i) i/(n-i+1)`.

    Example: `fair_coin_cdf(1, 3)` -> (3 + 1) / 8 = 0.5.
    """
    below = np.arange(k, 0, -1)
    return math.comb(n, k) / (1 << n) * (1 + float(np.cumprod(below / (n - below + 1)).sum()))
