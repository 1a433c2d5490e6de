"""Risk control: the threshold at which a mixture of two models is not worse than the better one by more than a margin.

Learn then test (Angelopoulos, Bates, Candes, Jordan and Lei 2021, arXiv:2110.01052) with fixed-sequence testing: the
hypotheses "with this threshold the mixture loses more than the margin" are tested from the strictest threshold on,
each at level 1 - confidence, until one is not rejected. The last rejected threshold keeps the promise with that
confidence, whatever the confidences of the replies are worth. The loss of a request is

    teacher's score - student's score    if the student answers it, else 0

which is in [-1, 1] for scores in [0, 1]. The p-value of a threshold is twice the smaller of two valid ones:

    bounded   of the losses above 0 alone, which are in [0, 1]: Hoeffding and Bentkus (the same paper); of scores of 0
              and 1 the binomial probability of no more losses than were seen
    betting   of all losses: the capital of a gambler who bets on losses below the margin, which grows above 1 / p with
              a probability of at most p if they are not (Waudby-Smith and Ramdas 2023, arXiv:2010.09686)

The first is sharp where the student never beats the teacher, the second where it sometimes does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reinforge.evaluation.statistics import compute_mean_interval
from reinforge.routing.signals import choose_thresholds

Values = NDArray[np.float64]

SHARE_OF_THRESHOLDS = 0.1
"""Of the clusters, whose confidences alone are used where no thresholds are given."""
CAP = 0.8
"""Of the largest bet that never loses everything."""
PRIOR = 0.02
"""Variance of the losses before any is seen."""


@dataclass(frozen=True, slots=True)
class RoutingPoint:
    """One threshold: what stays with the student, and at which quality."""

    threshold: float
    share: float  # of the requests, answered by the student
    difference: float  # mean score of the mixture minus that of the teacher
    p_value: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The threshold that keeps the promise, and all that were tested."""

    threshold: float | None  # the student answers from this confidence on; None: no threshold keeps the promise
    share: float  # of the requests, answered by the student, with its 95 % interval
    share_low: float
    share_high: float
    difference: float  # of the mixture and the teacher, measured
    margin: float
    confidence: float
    num_requests: int  # that the thresholds were tested on
    num_clusters: int
    kept: tuple[float, ...]  # all thresholds that keep the promise, the strictest first
    curve: tuple[RoutingPoint, ...]  # the strictest first
    data_sha256: str

    def __str__(self) -> str:
        lost = f"lose at most {self.margin:g} with {100 * self.confidence:g} % confidence"
        if self.threshold is None:
            return f"No request stays local: no threshold was shown to {lost} on {self.num_requests:,} requests"
        if not self.share:
            why = f"the lowest threshold that was shown to {lost} is {self.threshold:.4g}"
            return f"No request stays local: {why}, above the confidences of all {self.num_requests:,} requests"
        percent = f"{self.share:.0%}" if self.share >= 0.005 else "less than 1%"
        share = f"{percent} of the requests stay local [{self.share_low:.0%}, {self.share_high:.0%}]"
        promise = f"not worse than the teacher by more than {self.margin:g} with {100 * self.confidence:g} % confidence"
        return f"{share}: {promise} (difference {self.difference:+.3f} on {self.num_requests:,} requests)"


def calibrate(
    confidences: ArrayLike,
    student_scores: ArrayLike,
    teacher_scores: ArrayLike,
    margin: float,
    confidence: float = 0.95,
    clusters: Sequence[str] | None = None,
    *,
    thresholds: Sequence[float] | None = None,
    seed: int = 0,
) -> Calibration:
    """Returns the lowest threshold at which the mixture is not worse than the teacher by more than the margin.

    Args:
        confidences: `[N]`, of the student's replies; more is more confident.
        student_scores: `[N]`, in [0, 1].
        teacher_scores: `[N]`, in [0, 1], of the same requests.
        clusters: `[N]` names, such as conversations; requests of one cluster are not independent. None: all are.
        thresholds: To test; they must not follow from these requests. None: a tenth of them is used for its confidences
            alone, and not tested on.
        seed: Orders the requests, and draws that tenth.

    Raises:
        ValueError: Wrong lengths, scores outside [0, 1], a confidence that is not finite, or too few requests.
    """
    values, student, teacher = (
        np.asarray(each, dtype=np.float64) for each in (confidences, student_scores, teacher_scores)
    )
    codes = np.unique(list(clusters), return_inverse=True)[1] if clusters is not None else np.arange(values.size)
    _check(values, student, teacher, codes, margin)
    random = np.random.default_rng(seed)
    data = hashlib.sha256(np.stack([values, student, teacher, codes.astype(np.float64)]).tobytes()).hexdigest()
    if thresholds is None:
        order = random.permutation(codes.max() + 1)
        is_used = np.isin(codes, order[: max(1, round(SHARE_OF_THRESHOLDS * order.size))])
        thresholds = choose_thresholds(values[is_used])
        values, student, teacher = (each[~is_used] for each in (values, student, teacher))
        codes = codes[~is_used]
    tested = np.unique(np.asarray(thresholds, dtype=np.float64))[::-1]
    is_kept_TN = values >= tested[:, None]
    losses_TN = np.where(is_kept_TN, teacher - student, 0.0)
    p_values = compute_p_values(losses_TN, margin, 1 - confidence, codes, random)
    num_kept = int(np.argmin([*(p_values <= 1 - confidence), False]))
    shares, differences = is_kept_TN.mean(axis=1), 0.0 - losses_TN.mean(axis=1)
    columns = (tested, shares, differences, p_values)
    curve = tuple(RoutingPoint(*map(float, row)) for row in zip(*columns, strict=True))
    local = is_kept_TN[num_kept - 1] if num_kept else np.zeros(values.size, dtype=bool)
    share, low, high = compute_mean_interval(local.astype(float).tolist(), names=[str(code) for code in codes])
    return Calibration(
        threshold=float(tested[num_kept - 1]) if num_kept else None,
        share=share,
        share_low=low or 0.0,
        share_high=1.0 if high is None else high,
        difference=curve[num_kept - 1].difference if num_kept else 0.0,
        margin=margin,
        confidence=confidence,
        num_requests=values.size,
        num_clusters=np.unique(codes).size,
        kept=tuple(tested[:num_kept].tolist()),
        curve=curve,
        data_sha256=data,
    )


def _check(values: Values, student: Values, teacher: Values, codes: NDArray[np.int64], margin: float) -> None:
    sizes = [each.size for each in (values, student, teacher, codes)]
    if len(set(sizes)) > 1 or values.ndim != 1:
        raise ValueError(f"expected one confidence, two scores and one cluster of each request, found {sizes}")
    if np.unique(codes).size < 2:
        raise ValueError("expected requests of two clusters or more")
    scores = np.concatenate([student, teacher])
    if not (np.isfinite(values).all() and ((scores >= 0) & (scores <= 1)).all()):
        raise ValueError("expected finite confidences and scores from 0 to 1; divide the scores by their largest value")
    if not 0 < margin < 1:
        raise ValueError(f"expected a margin between 0 and 1, found {margin:g}")


def compute_p_values(
    losses_TN: Values,
    margin: float,
    level: float,
    codes: NDArray[np.int64] | None = None,
    random: np.random.Generator | None = None,
) -> Values:
    """Returns, for each row of losses, a p-value of the hypothesis that their mean is at least the margin.

    Requests of one cluster are one observation: the sum of their losses, each less the margin, divided by the size of
    the largest cluster, so that it stays in [-1 - margin, 1 - margin].

    Args:
        losses_TN: In [-1, 1].
        level: At which the p-values are to decide; the bets are sized for it.
    """
    random = np.random.default_rng(0) if random is None else random
    excess_TC = _sum_clusters(losses_TN - margin, codes)
    bounded_TC = _sum_clusters(np.maximum(losses_TN, 0) - margin, codes) + margin
    bets = compute_betting_p_values(-excess_TC[:, random.permutation(excess_TC.shape[1])], 1 - margin, level / 2)
    return np.minimum(1.0, 2 * np.minimum(compute_bounded_p_values(bounded_TC, margin), bets))


def _sum_clusters(values_TN: Values, codes: NDArray[np.int64] | None) -> Values:
    if codes is None or np.unique(codes).size == codes.size:
        return values_TN
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    largest = int(np.diff([*starts, codes.size]).max())
    return np.asarray(np.add.reduceat(values_TN[:, order], starts, axis=1) / largest)


def compute_bounded_p_values(values_TN: Values, margin: float) -> Values:
    """Returns p-values of the hypothesis that the mean of values in [0, 1] is at least the margin.

    Of values of 0 and 1: P(Bin(n, margin) <= their sum). Of others, with their mean r:

        min(exp(-n kl(r, margin)), e P(Bin(n, margin) <= ceil(n r))),  kl(a, b) = a log(a/b) + (1 - a) log((1-a)/(1-b))

    Example: 1 loss among 200 with the margin 0.02 -> 0.98^200 + 200 * 0.02 * 0.98^199 = 0.089.
    """
    n = values_TN.shape[1]
    means = values_TN.mean(axis=1)
    most = math.ceil(n * margin) + 1
    counts = np.arange(most)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log((n - counts[:-1]) / (counts[:-1] + 1)))])
    below = np.cumsum(np.exp(log_choose + counts * math.log(margin) + (n - counts) * math.log1p(-margin)))
    sums = np.minimum(np.ceil(means * n - 1e-9), most - 1).astype(int)
    if np.isin(values_TN, (0.0, 1.0)).all():
        return np.where(means < margin, below[sums], 1.0)
    safe = np.clip(means, 1e-300, margin)
    divergence = safe * np.log(safe / margin) + (1 - safe) * np.log((1 - safe) / (1 - margin))
    bound = np.minimum(np.exp(-n * divergence), math.e * below[sums])
    return np.where(means < margin, np.minimum(1.0, bound), 1.0)


def compute_betting_p_values(gains_TN: Values, largest_loss: float, level: float) -> Values:
    """Returns p-values of the hypothesis that the mean of gains is at most 0.

    The capital is the product of `1 + bet * gain`; each bet follows from earlier gains alone, so under the hypothesis
    the capital is a supermartingale, and its largest value exceeds 1 / p with a probability of at most p (Ville).
    The bets are those of arXiv:2010.09686 for a number of values that is fixed before: `sqrt(2 log(1 / level) /
    (n variance))`, with the variance of earlier gains, and capped.

    Args:
        largest_loss: No gain is below minus this.
    """
    n = gains_TN.shape[1]
    squares = np.cumsum(gains_TN**2, axis=1) - gains_TN**2  # of earlier gains
    variances = (PRIOR + squares) / np.arange(1, n + 1)
    bets = np.minimum(np.sqrt(2 * math.log(1 / level) / (n * variances)), CAP / largest_loss)
    capital = np.cumsum(np.log1p(bets * gains_TN), axis=1).max(axis=1)
    return np.asarray(np.exp(-np.maximum(capital, 0.0)))
