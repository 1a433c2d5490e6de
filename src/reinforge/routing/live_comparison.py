"""A comparison of two versions in production that may be looked at after every score, and decided at any time.

    averages of users       candidate    served
        ann                 1.0          0.5
        ben                              0.0       none of ben's conversations with the candidate has a score
        eve                 0.5          1.0
    difference of the means of the columns: 0.75 - 0.5 = +0.25

Each user counts once in each column, however many scores they send: a few users with most of the feedback do not
decide. Users are also the clusters of the standard error. The interval holds at all times together (an asymptotic
confidence sequence with the normal mixture of Robbins 1970: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024,
arXiv:2103.06476, theorem 2.2):

    difference +- se sqrt((1 + 1 / r) (log(1 + r) + 2 log(1 / alpha))),    r = (expected / se)^2

Differs from the paper: the values are users' averages, which change with further scores, in two columns; time is the
information 1 / se^2, in which such estimates behave as sums of independent values (Scharfstein, Tsiatis and Robins
1997). Bets on bounded means (arXiv:2010.09686) need no limit theorem, but they bet on conversations, not on users.

Guards use the same interval on what the calls of users cost. For the largest ratio L of the seconds c and s of a reply,
it is that of c - L s: the ratio is larger if all of it lies above 0. A user's average counts at most `MOST` times the
median of the served version, which is the unit of the scale [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from reinforge.evaluation.statistics import Scores, format_interval
from reinforge.routing.score_shift import ShiftCheck

LiveOutcome = Literal["promote", "harm", "futility", "guard", "continue"]
GuardState = Literal["ok", "above", "beyond"]
METRICS = {"latency": "seconds per reply", "length": "tokens per reply", "errors": "of the calls failed or were cut"}
MOST = 5.0
"""A user's average of seconds or tokens counts at most this times the median user of the served version."""
SMALLEST = 1e-3  # seconds, or tokens: smaller ones have no ratio
SHIFT_ALPHA = 0.05
"""Without a shift of the scores, the probability that a comparison is ever paused is at most this."""


class LiveLimits(BaseModel):
    """What a candidate may cost, whatever its scores are; null: that metric is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    latency: float | None = Field(1.5, gt=1, le=4)
    """Largest ratio of the seconds from a request to the end of its reply, to the served version's."""
    length: float | None = Field(1.5, gt=1, le=4)
    """Largest ratio of the tokens of a reply to the served version's."""
    errors: float | None = Field(0.02, ge=0, lt=1)
    """Largest difference of the shares of calls that failed or whose reply was cut at a limit."""


class LiveTest(BaseModel):
    """When a candidate is promoted or stopped, by the scores of conversations; fixed before the first one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    confidence: float = Field(0.97, gt=0.5, lt=1)
    """Of the interval, at all times together: a candidate without effect is promoted in half of the rest at most."""
    harm_confidence: float = Field(0.8, gt=0.5, lt=1)
    """Of the interval that has to lie below 0 to stop it for harm; a needless stop costs less than a needless wait."""
    margin: float = Field(0.0, ge=0, lt=1)
    """A candidate is promoted if the whole interval lies above this."""
    worthwhile: float = Field(0.03, ge=0, lt=1)
    """It is stopped for futility if the whole interval lies below this."""
    expected: float = Field(0.1, gt=0, lt=1)
    """Size of the difference for which the interval is the most narrow."""
    min_users: int = Field(100, ge=10)
    """Nothing is decided before each version has scores of so many users."""
    max_conversations: int = Field(4000, ge=1)
    """Conversations with a score after which an undecided candidate is stopped for futility."""
    guards: LiveLimits = LiveLimits()
    """A candidate beyond one of these is stopped, and one above it is not promoted."""


class LiveScore(NamedTuple):
    """The score of a conversation."""

    split: int  # seed of the split that drew its version
    conversation: str
    user: str
    version: int
    score: float | None  # in [0, 1]; None: it has none, or no longer


class LiveCall(NamedTuple):
    """A call whose version was drawn, rated or not."""

    split: int  # seed of the split that drew its version
    user: str
    version: int
    seconds: float | None  # None: it has no reply
    tokens: int | None
    is_error: bool  # it failed, or its reply was cut at a limit


@dataclass(frozen=True, slots=True)
class LiveGuard:
    """How the calls stand to a limit."""

    limit: float
    num_users: tuple[int, int]  # with calls of the candidate, of the served version
    candidate: float | None = None  # mean over users
    served: float | None = None
    value: float | None = None  # ratio of both, or difference of errors; None: one of them has no calls
    ci_low: float | None = None
    ci_high: float | None = None
    state: GuardState = "ok"  # above: the value is above the limit; beyond: the whole interval is

    def describe(self, name: str) -> str:
        measured = f"{self.candidate:.3g} {METRICS[name]} against {self.served:.3g} of the served version"
        what = "difference" if name == "errors" else "ratio"
        interval = f"[{self.ci_low:.3g}, {self.ci_high:.3g}]"
        return f"the guard {name}: {measured}, {what} {self.value:.3g} {interval}, limit {self.limit:g}"


@dataclass(frozen=True, slots=True)
class LiveResult:
    """How a running comparison stands."""

    outcome: LiveOutcome
    reason: str
    difference: float | None  # mean of candidate minus served, over users; None: one of them has no score
    ci_low: float | None
    ci_high: float | None
    num_users: tuple[int, int]  # with a score of the candidate, of the served version
    num_conversations: tuple[int, int]
    guards: dict[str, LiveGuard]
    paused: str | None  # why nothing is promoted now
    pauses: tuple[str, ...]  # all so far


def describe_user(candidate: Scores, served: Scores) -> Scores:
    """Returns what a user adds to the sums of `compute_interval`, `[..., 10]`; NaN: no average for that version.

    Example: averages 1 and 0.5 -> [1, 1, 1, 1, 0.5, 0.25, 1, 1, 0.5, 0.5].
    """
    has_candidate, has_served = ~np.isnan(candidate), ~np.isnan(served)
    both, c, s = has_candidate & has_served, np.nan_to_num(candidate), np.nan_to_num(served)
    columns = [has_candidate, c, c * c, has_served, s, s * s, both, both * c, both * s, c * s]
    return np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.float64)


def compute_interval(
    sums: Scores, expected: float, confidence: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns the difference and the ends of its interval, each `[...]`, from sums over users `[..., 10]`.

    The variances count one more user with the score 0 and one with 1, so that equal scores do not seem to be certain.

    Example: 100 users with 1 and 100 others with 0, expected 0.1 and confidence 0.95 -> 1 [0.955, 1].
    """
    n_c, sum_c, squares_c, n_s, sum_s, squares_s, n_both, both_c, both_s, products = np.moveaxis(sums, -1, 0)
    mean_c, mean_s = sum_c / n_c, sum_s / n_s
    variance = _compute_variance(n_c, mean_c, squares_c) + _compute_variance(n_s, mean_s, squares_s)
    shared = products - mean_s * both_c - mean_c * both_s + n_both * mean_c * mean_s  # of users of both versions
    half = _compute_half(variance - 2 * shared / (n_c * n_s), expected, confidence)
    difference = mean_c - mean_s
    return difference, np.maximum(difference - half, -1), np.minimum(difference + half, 1)


def _compute_variance(n: Scores, mean: Scores, squares: Scores) -> Scores:
    return (squares - n * mean**2 + mean**2 + (1 - mean) ** 2) / (n * (n + 1))


def _compute_half(squared_error: Scores, expected: float, confidence: float) -> Scores:
    """Returns half the width of an interval that holds at all times together."""
    information = expected**2 / squared_error
    spread = (1 + 1 / information) * (np.log1p(information) - 2 * math.log(1 - confidence))
    return np.sqrt(squared_error * spread)


class CallGuards:
    """What the calls with a candidate cost, and those with the version that it may replace, by user."""

    def __init__(self, rule: LiveTest):
        self._rule = rule
        self._rows: dict[str, int] = {}  # by user
        self._held = np.zeros((64, len(METRICS), 2, 2))  # by row, metric and version: sum and number

    def put(self, call: LiveCall, *, is_candidate: bool) -> None:
        row = self._rows.setdefault(call.user, len(self._rows))
        if row == len(self._held):
            self._held = np.concatenate([self._held, np.zeros_like(self._held)])
        for metric, value in enumerate((call.seconds, call.tokens, call.is_error)):
            if value is not None:
                self._held[row, metric, 0 if is_candidate else 1] += value, 1

    def judge(self) -> dict[str, LiveGuard]:
        limits = self._rule.guards
        with np.errstate(invalid="ignore"):
            averages = self._held[..., 0] / self._held[..., 1]
        return {
            name: self._judge(averages[:, place], limit, is_ratio=name != "errors")
            for place, name in enumerate(METRICS)
            if (limit := getattr(limits, name)) is not None
        }

    def _judge(self, averages: Scores, limit: float, *, is_ratio: bool) -> LiveGuard:
        candidate, served = averages.T
        n = int((~np.isnan(candidate)).sum()), int((~np.isnan(served)).sum())
        if min(n) == 0:
            return LiveGuard(limit, n)
        weight, scale, begin, unit = 1.0, 1.0, 0.0, 1.0
        if is_ratio:
            most = MOST * max(float(np.nanmedian(served)), SMALLEST)
            candidate, served = np.minimum(candidate, most), np.minimum(served, most)
            weight, scale, begin = limit, limit * most, limit
            unit = scale / max(float(np.nanmean(served)), SMALLEST)
        sums = describe_user(candidate / scale, weight * served / scale).sum(0)
        found = compute_interval(sums, self._rule.expected, self._rule.confidence)
        value, low, high = (begin + float(each) * unit for each in found)
        means = float(np.nanmean(candidate)), float(np.nanmean(served))
        is_beyond = min(n) >= self._rule.min_users and low > limit
        state: GuardState = "beyond" if is_beyond else "above" if value > limit else "ok"
        return LiveGuard(limit, n, *means, value, max(low, 0.0) if is_ratio else low, high, state)


class LiveComparison:
    """The scores of the conversations with a candidate and with the version that it may replace.

    Which version answers a conversation must be drawn at random, independently of the user.

    Attributes:
        guards: What their calls cost.

    Example: put("s1", "ann", 0.9, is_candidate=True), put("s2", "ben", 0.4, is_candidate=False), judge().outcome.
    """

    def __init__(self, rule: LiveTest | None = None):
        self.rule = rule or LiveTest()
        self._scores: dict[str, tuple[str, int, float]] = {}  # by conversation
        self._users: dict[str, NDArray[np.float64]] = {}  # sums and numbers of scores by version [2, 2]
        self._sums = np.zeros(10)
        self._counts = [0, 0]
        self.guards = CallGuards(self.rule)
        few = self.rule.min_users
        self._shifts = [ShiftCheck(SHIFT_ALPHA / 2, few // 2, few) for _ in range(2)]
        self._pauses: list[tuple[int, str]] = []  # version and reason

    def put(self, conversation: str, user: str, score: float | None, *, is_candidate: bool) -> None:
        """Takes the score of a conversation, in place of an earlier one; None takes it back."""
        if score is not None and not 0 <= score <= 1:
            raise ValueError(f"expected a score from 0 to 1, found {score}")
        if (earlier := self._scores.pop(conversation, None)) is not None:
            self._add(*earlier, sign=-1)
        if score is not None:
            self._scores[conversation] = added = (user, 0 if is_candidate else 1, float(score))
            self._add(*added)
            check = self._shifts[added[1]]
            if (direction := check.add(user, score)) is not None:
                what = f"scores of the {'candidate' if is_candidate else 'served version'} shifted {direction}"
                when = f"found after {check.num_counted} scores of its users"
                resumes = f"promotion resumes after {self.rule.min_users} more without a shift"
                self._pauses.append((added[1], f"the {what}, {when}; {resumes}"))

    @property
    def paused(self) -> str | None:
        """Why nothing is promoted now: the newest shift of a version whose scores are not stable yet."""
        reasons = (reason for version, reason in reversed(self._pauses) if self._shifts[version].num_left)
        return next(reasons, None)

    def _add(self, user: str, version: int, score: float, sign: int = 1) -> None:
        held = self._users.setdefault(user, np.zeros((2, 2)))
        before = self._describe(held)
        held[version] += sign * score, sign
        self._sums += self._describe(held) - before
        self._counts[version] += sign
        if not held[:, 1].any():
            del self._users[user]

    @staticmethod
    def _describe(held: NDArray[np.float64]) -> Scores:
        averages = np.where(held[:, 1] > 0, held[:, 0] / np.maximum(held[:, 1], 1), np.nan)
        return describe_user(averages[0], averages[1])

    def describe_version(self, *, is_candidate: bool) -> dict[str, Any]:
        """Returns how many users and conversations of a version have a score, their mean over users, and its interval.

        Example: 10 users with 1 -> users 10, conversations 10, mean 1, ci_low 0.19, ci_high 1.
        """
        place = 0 if is_candidate else 1
        n, total, squares = self._sums[3 * place : 3 * place + 3]
        counts = {"users": round(float(n)), "conversations": self._counts[place]}
        if not counts["users"]:
            return {**counts, "mean": None, "ci_low": None, "ci_high": None}
        mean, rule = total / n, self.rule
        half = float(_compute_half(_compute_variance(n, mean, squares), rule.expected, rule.confidence))
        return {**counts, "mean": float(mean), "ci_low": max(mean - half, 0.0), "ci_high": min(mean + half, 1.0)}

    def judge(self) -> LiveResult:
        """Returns what to do now; asking more often makes no false promotion more likely."""
        rule, num_users = self.rule, (round(float(self._sums[0])), round(float(self._sums[3])))
        counts = (self._counts[0], self._counts[1])
        if min(num_users) == 0:
            difference, low, high, measured = None, None, None, "no interval"
        else:
            difference, low, high = map(float, compute_interval(self._sums, rule.expected, rule.confidence))
            measured = format_interval(difference, low, high, signed=True)
        outcome, why = self._decide(low, high, min(num_users), sum(counts))
        reason = f"{why}: {measured}, by {num_users[0]} users of the candidate and {num_users[1]} of the served version"
        guards, paused = self.guards.judge(), self.paused
        if outcome in ("promote", "continue"):
            outcome, reason = self._hold(outcome, reason, guards, paused, sum(counts))
        pauses = tuple(reason for _, reason in self._pauses)
        return LiveResult(outcome, reason, difference, low, high, num_users, counts, guards, paused, pauses)

    def _hold(
        self, outcome: LiveOutcome, reason: str, guards: dict[str, LiveGuard], paused: str | None, num_scores: int
    ) -> tuple[LiveOutcome, str]:
        """Returns what guards and a pause make of a candidate that is not stopped for its scores."""
        by_state = {each.state: each.describe(name) for name, each in guards.items() if each.state != "ok"}
        if "beyond" in by_state:
            return "guard", f"stopped by {by_state['beyond']}"
        if outcome == "promote" and "above" in by_state:
            is_over = num_scores >= self.rule.max_conversations
            return "futility" if is_over else "continue", f"{reason}; not promoted because of {by_state['above']}"
        if outcome == "promote" and paused is not None:
            return "continue", f"{reason}; promotion is paused: {paused}"
        return outcome, reason

    def _decide(
        self, low: float | None, high: float | None, num_users: int, num_scores: int
    ) -> tuple[LiveOutcome, str]:
        rule = self.rule
        if num_users >= rule.min_users and low is not None and high is not None:
            if low > rule.margin:
                return "promote", f"the candidate scores higher by more than {rule.margin:g}"
            if compute_interval(self._sums, rule.expected, rule.harm_confidence)[2] < 0:
                return "harm", "the candidate scores lower"
            if high < rule.worthwhile:
                return "futility", f"the candidate is not better by {rule.worthwhile:g}"
        if num_scores >= rule.max_conversations:
            return "futility", f"no decision within {rule.max_conversations:,} conversations"
        few = f"fewer than {rule.min_users} users of each version have a score"
        return "continue", few if num_users < rule.min_users else "not decided"
