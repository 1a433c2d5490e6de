"""Non-inferiority: whether a model is not worse than a reference by more than a margin, on the same examples.

    interval of student minus teacher    margin 0.02
    [-0.015, +0.007]                     not worse      it lies above -0.02
    [-0.080, -0.030]                     worse          it lies below -0.02
    [-0.030, +0.010]                     not decided    it includes -0.02: more examples are needed

The margin must be fixed before the scores are seen. The interval is two-sided, so that of 40 models that are worse by
exactly the margin at most one is called not worse (as ICH E9 and E10 ask of trials).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np

from reinforge.evaluation.statistics import (
    Improvement,
    Scores,
    compute_clustered_error,
    compute_paired_difference,
    count_independent,
    count_needed_pairs,
    format_interval,
    list_names,
    t_quantile,
)
from reinforge.types.evaluation import EvalInputItem, count_examples

NonInferiorityOutcome = Literal["not worse", "worse", "not decided"]

POWER = 0.8  # probability with which the examples that are asked for decide, if the difference is the measured one
MIN_OF_SLICE = 10  # slices with fewer examples are left out
DAY_KEYS = ("day", "date", "timestamp", "created_at", "time")


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """Whether a model is not worse than a reference by more than a margin, and how that was found."""

    outcome: NonInferiorityOutcome
    margin: float  # in units of the metric
    difference: float  # mean of student minus teacher
    ci_low: float | None  # ends of the interval; None: the spread is unknown
    ci_high: float | None
    num_pairs: int
    num_clusters: int
    num_more: int | None  # further examples that decide with 80 % power; None: it is decided, or no number would
    confidence: float
    method: str
    reference: str = "the teacher"
    slices: dict[str, NonInferiority] = field(default_factory=dict)  # of parts of the examples, see `judge_slices`
    transfer: dict[str, NonInferiority] = field(default_factory=dict)  # of other examples that were kept apart, by task

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        parts = {
            part: {name: cls.from_dict(each) for name, each in values.get(part, {}).items()}
            for part in ("slices", "transfer")
        }
        return cls(**{**values, **parts})

    def headline(self, promoted: bool | None, *, has_warnings: bool) -> str:
        """Returns how a run ended, to follow its name: `is not worse than llms.teacher`."""
        if self.outcome == "not decided":
            return f"may be worse than {self.reference}: too few examples to decide"
        held_back = ", but did not pass the gate" if self.outcome == "not worse" and not promoted else ""
        return f"is {self.outcome} than {self.reference}{held_back}{' (read the warning)' if has_warnings else ''}"

    def subtract(self, other: NonInferiority) -> tuple[float, float | None, float | None]:
        """Returns how much larger this difference is than that on other examples, with its 95 % interval.

        From the two intervals, for independent examples (Zou and Donner 2008, Statistics in Medicine 27:1693):

            d1 - d2 - sqrt((d1 - low1)^2 + (high2 - d2)^2)  to  d1 - d2 + sqrt((high1 - d1)^2 + (d2 - low2)^2)

        Example: -0.10 [-0.20, 0.00] and 0.00 [-0.02, 0.02] -> -0.10 [-0.202, 0.002].
        """
        mean = self.difference - other.difference
        if self.ci_low is None or self.ci_high is None or other.ci_low is None or other.ci_high is None:
            return mean, None, None
        down = math.hypot(self.difference - self.ci_low, other.ci_high - other.difference)
        up = math.hypot(self.ci_high - self.difference, other.difference - other.ci_low)
        return mean, mean - down, mean + up

    def __str__(self) -> str:
        """Returns `not worse than the teacher by more than 0.02 (difference -0.004 [-0.015, +0.007] on ...)`."""
        interval = format_interval(self.difference, self.ci_low, self.ci_high, signed=True)
        measured = f"(difference {interval} on {count_examples(self.num_pairs, self.num_clusters)})"
        compared = f"than {self.reference} by more than {self.margin:g} {measured}"
        if self.outcome != "not decided":
            return f"{self.outcome} {compared}"
        needed = f"; about {self.num_more:,} more examples are needed" if self.num_more is not None else ""
        return f"not decided whether it is worse {compared}{needed}"


def judge_non_inferiority(
    student: Mapping[str, float],
    teacher: Mapping[str, float],
    clusters: Mapping[str, str] | None,
    margin: float,
    confidence: float = 0.95,
) -> NonInferiority:
    """Returns whether a student is not worse than its teacher by more than a margin, from their scores by example id.

    Only examples with both scores count. Where all scores are 0 or 1, the interval is the score interval for paired
    proportions (Tango 1998, Statistics in Medicine 17:891): the differences d that the test

        Z(d) = (b - c - n d) / sqrt(n (2 q + d (1 - d))),   q = (sqrt(B^2 - 8 n C) - B) / (4 n),
        B = (2 n - b + c) d - b - c,  C = -c d (1 - d)

    does not reject, with b of n examples gained and c lost. Unlike Student's t it holds where few examples differ: of
    200 examples without a difference it excludes a loss of 0.02 just about, and with one lost it does not. Clusters
    reduce n, b and c to the effective number of examples. Other scores get the interval of `compute_paired_difference`.

    The further examples are those with which this difference is decided in 80 of 100 cases.

    Example: 8 of 200 gained and 6 lost, margin 0.05 -> 0.01 [-0.03, 0.05], not worse; margin 0.02 -> not decided.

    Args:
        clusters: Example id -> its cluster, such as the conversation; an example without one is its own.
        margin: The largest loss to accept, above 0, in units of the metric.
        confidence: Of the two-sided interval.

    Raises:
        ValueError: Fewer than two examples have both scores, or the margin is not above 0.
    """
    ids = sorted(student.keys() & teacher.keys())
    if not margin > 0 or len(ids) < 2:
        raise ValueError(f"expected a margin above 0 and two examples with both scores, found {margin} and {len(ids)}")
    names = list_names(ids, clusters)
    student_scores, teacher_scores = ([float(arm[id_]) for id_ in ids] for arm in (student, teacher))
    if len(set(names)) > 1 and {*student_scores, *teacher_scores} <= {0.0, 1.0}:
        return _judge_binary(np.subtract(student_scores, teacher_scores), names, margin, confidence)
    change = compute_paired_difference(dict(teacher), dict(student), level=confidence, clusters=clusters)
    num_clusters = change.num_clusters or change.num_pairs
    outcome, needed = _decide(change.ci_low, change.ci_high, margin), None
    if outcome == "not decided" and change.ci_low is not None and change.ci_high is not None:
        effect = change.mean_difference + margin
        half = change.mean_difference - change.ci_low if effect > 0 else change.ci_high - change.mean_difference
        sized = Improvement(abs(effect), None, abs(effect) + half, 1.0, change.num_pairs, "", num_clusters)
        needed = count_needed_pairs(sized, power=POWER, level=confidence)
    num_more = None if needed is None else max(1, needed - change.num_pairs)
    method = change.method.partition(";")[0]
    interval = (change.mean_difference, change.ci_low, change.ci_high)
    return NonInferiority(outcome, margin, *interval, change.num_pairs, num_clusters, num_more, confidence, method)


def _decide(low: float | None, high: float | None, margin: float) -> NonInferiorityOutcome:
    if low is not None and low > -margin:
        return "not worse"
    return "worse" if high is not None and high < -margin else "not decided"


def _judge_binary(differences: Scores, names: Sequence[str], margin: float, confidence: float) -> NonInferiority:
    num_pairs, num_clusters = len(names), len(set(names))
    share = count_effective(differences, names, confidence) / num_pairs
    counts = ((differences > 0).sum() * share, (differences < 0).sum() * share, num_pairs * share)
    gained, lost, effective = map(float, counts)
    normal = NormalDist()
    z = normal.inv_cdf((1 + confidence) / 2)
    low = _find_score_bound(gained, lost, effective, z)
    high = -_find_score_bound(lost, gained, effective, z)
    outcome, num_more = _decide(low, high, margin), None
    if outcome == "not decided" and (statistic := abs(_compute_score(gained, lost, effective, -margin))) > 1e-9:
        needed = num_pairs * ((z + normal.inv_cdf(POWER)) / statistic) ** 2  # it grows as the root of the number
        num_more = max(1, math.ceil(needed) - num_pairs)
    interval, over = (float(differences.mean()), low, high), f" over {num_clusters} clusters"
    method = f"score interval for paired proportions{over if num_clusters < num_pairs else ''}"
    return NonInferiority(outcome, margin, *interval, num_pairs, num_clusters, num_more, confidence, method)


def count_effective(values: Scores, names: Sequence[str], confidence: float = 0.95) -> float:
    """Returns the number of independent values whose mean is as uncertain as that of these values in clusters."""
    if len(set(names)) == len(names):
        return float(len(names))
    residuals = values - values.mean()
    error, df = compute_clustered_error(residuals, names)
    if error <= 1e-12:
        return count_independent(names)
    z_over_t = NormalDist().inv_cdf((1 + confidence) / 2) / t_quantile(df, confidence)
    return min(float(len(names)), float((residuals**2).mean()) / error**2 * z_over_t**2)


def _find_score_bound(gained: float, lost: float, n: float, z: float) -> float:
    """Returns the lower end of the interval: where the test, which falls with the difference, crosses z."""
    low, high = -1.0, (gained - lost) / n
    for _ in range(60):
        middle = (low + high) / 2
        is_rejected = _compute_score(gained, lost, n, middle) > z
        low, high = (middle, high) if is_rejected else (low, middle)
    return low


def _compute_score(gained: float, lost: float, n: float, difference: float) -> float:
    linear = (2 * n - gained + lost) * difference - gained - lost
    constant = -lost * difference * (1 - difference)
    share = (math.sqrt(max(0.0, linear**2 - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * share + difference * (1 - difference))
    return (gained - lost - n * difference) / math.sqrt(max(variance, 1e-12))


def judge_slices(
    student: Mapping[str, float],
    teacher: Mapping[str, float],
    clusters: Mapping[str, str] | None,
    margin: float,
    slices: Mapping[str, Collection[str]],
    confidence: float = 0.95,
) -> dict[str, NonInferiority]:
    """Returns the outcome of each slice of at least 10 examples; all hold together with the confidence (Bonferroni).

    Args:
        slices: Name -> ids of its examples, as of `find_slices`.
    """
    both = student.keys() & teacher.keys()
    found = {name: both & set(ids) for name, ids in slices.items()}
    found = {name: ids for name, ids in found.items() if MIN_OF_SLICE <= len(ids) < len(both)}
    level = 1 - (1 - confidence) / max(1, len(found))
    arms = {name: ({i: student[i] for i in ids}, {i: teacher[i] for i in ids}) for name, ids in found.items()}
    return {name: judge_non_inferiority(*arm, clusters, margin, level) for name, arm in arms.items()}


def judge_with_slices(
    student: Mapping[str, float],
    teacher: Mapping[str, float],
    clusters: Mapping[str, str] | None,
    margin: float,
    items: Sequence[EvalInputItem],
    reference: str,
) -> NonInferiority:
    """Returns the outcome on all examples, with that of each slice of the rows that `find_slices` finds."""
    whole = judge_non_inferiority(student, teacher, clusters, margin)
    slices = judge_slices(student, teacher, clusters, margin, find_slices(items))
    named = {name: replace(each, reference=reference) for name, each in slices.items()}
    return replace(whole, reference=reference, slices=named)


def find_slices(items: Sequence[EvalInputItem]) -> dict[str, list[str]]:
    """Returns the ids of the examples by tag, by tool that the expected answer calls, by length of the input, by day.

    Example: rows with `tags: [billing]` -> `tag billing`; three rows with inputs of 5, 9 and 40 characters ->
    `length short`, `length medium` and `length long`.
    """
    found: dict[str, list[str]] = {}
    lengths = sorted(len(str(item.input_obj)) for item in items)
    for item in items:
        row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
        tags = row.get("tags", row.get("tag"))
        tags = [tags] if isinstance(tags, str) else tags if isinstance(tags, list) else []
        names = [f"tag {tag}" for tag in tags]
        names += [f"tool {name}" for name in _list_tools(item.expected_output_obj)]
        smaller = np.searchsorted(lengths, len(str(item.input_obj))) / len(lengths)
        names.append(f"length {('short', 'medium', 'long')[int(3 * smaller)]}")
        day = next((row[key] for key in DAY_KEYS if isinstance(row.get(key), str)), "")[:10]
        names += [f"day {day}"] if len(day) == 10 and day[4] == day[7] == "-" else []
        for name in dict.fromkeys(names):
            found.setdefault(name, []).append(str(item.id))
    return found


def _list_tools(answer: Any) -> list[str]:
    """Returns the names of the tools that an expected answer, a list of messages, calls."""
    messages = [each for each in answer if isinstance(each, Mapping)] if isinstance(answer, list) else []
    calls = [call for each in messages for call in each.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call.get("function") for call in calls]
    return [str(each["name"]) for each in functions if isinstance(each, Mapping) and "name" in each]
