"""Every evaluator before and after training, and the warning that a weighted reward rose through one part alone.

weights {judge: 0.8, format: 0.2};  judge 0.0 -> 0.0, format 0.1 -> 1.0  =>  the reward rose from 0.02 to 0.2, and the
                                    warning says that only `format` did
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from reinforge.evaluation.statistics import Improvement, compute_paired_difference, format_interval, summarize
from reinforge.types.evaluation import EvaluationReport, MetricSummary


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One evaluator before and after training, on `confirm`, or on `select` if there was no comparison on `confirm`."""

    metric: str
    split: str
    before: MetricSummary | None
    after: MetricSummary | None
    improvement: Improvement | None = None  # None: not compared example by example
    weight: float | None = None  # None: not a part of a `weighted` reward

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        before, after = (MetricSummary(**values[key]) if values[key] else None for key in ("before", "after"))
        improvement = Improvement(**values["improvement"]) if values["improvement"] else None
        return cls(values["metric"], values["split"], before, after, improvement, values["weight"])

    def __str__(self) -> str:
        """Returns `judge 0.100 -> 0.400, change +0.300 [+0.200, +0.400], weight 0.8`."""
        parts = [f"{self.metric} {_format_mean(self.before)} -> {_format_mean(self.after)}"]
        if self.improvement is not None and self.improvement.ci_low is not None:
            parts.append(f"change {self.improvement}")
        if self.weight is not None:
            parts.append(f"weight {self.weight:g}")
        shown = self.after or self.before
        if shown is not None and shown.num_unscored:
            reason = f" ({shown.unscored_reason})" if shown.unscored_reason else ""
            parts.append(f"{shown.num_unscored} unscored{reason}")
        return ", ".join(parts)

    @property
    def direction(self) -> int:
        """How it moved the weighted sum: 1 up, -1 down, 0 if the interval of its change includes 0."""
        change = self.improvement
        if change is None or change.ci_low is None or change.ci_high is None:
            return 0
        moved = 1 if change.ci_low > 0 else -1 if change.ci_high < 0 else 0
        return -moved if (self.weight or 0) < 0 else moved


def select_scored_in_both(
    metric: str, base: EvaluationReport, tuned: EvaluationReport
) -> tuple[dict[str, float], dict[str, float]]:
    base_scores, tuned_scores = base.scores.get(metric, {}), tuned.scores.get(metric, {})
    ids = sorted(base_scores.keys() & tuned_scores.keys())
    return {i: base_scores[i] for i in ids}, {i: tuned_scores[i] for i in ids}


def summarize_arm(
    metric: str, report: EvaluationReport, scores: dict[str, float], other: EvaluationReport
) -> MetricSummary:
    """Returns one model's mean over the examples that both models have a score on."""
    own, others = (each.summaries.get(metric) for each in (report, other))
    reason = (own.unscored_reason if own else None) or (others.unscored_reason if others else None)
    return summarize(metric, scores, max(report.num_examples, other.num_examples), reason, report.clusters)


def compare_reports(
    base: EvaluationReport, tuned: EvaluationReport, weights: Mapping[str, float]
) -> list[MetricChange]:
    """Returns every evaluator before and after, over the examples that both models have a score on.

    `weights` are those of the parts of the reward, if it is `weighted`.
    """
    changes = []
    for metric in dict.fromkeys([*base.scores, *tuned.scores]):
        before, after = select_scored_in_both(metric, base, tuned)
        difference = compute_paired_difference(before, after, clusters=base.clusters) if len(before) > 1 else None
        arms = summarize_arm(metric, base, before, tuned), summarize_arm(metric, tuned, after, base)
        changes.append(MetricChange(metric, tuned.split, *arms, difference, weights.get(metric)))
    return changes


def compare_summaries(
    before: Mapping[str, MetricSummary], after: Mapping[str, MetricSummary], weights: Mapping[str, float]
) -> list[MetricChange]:
    """Returns every evaluator of two validations on `select`, without a test of the difference."""
    names = dict.fromkeys([*before, *after])
    return [MetricChange(name, "select", before.get(name), after.get(name), None, weights.get(name)) for name in names]


def find_one_sided_gain(changes: Sequence[MetricChange]) -> str | None:
    """Returns a warning if only one part of a weighted reward rose, or some part fell while another rose; else None.

    A part rose or fell if the 95 % interval of its change lies above or below 0; parts with a negative weight count the
    other way round.
    """
    parts = [change for change in changes if change.weight and change.improvement is not None]
    risen = [part for part in parts if part.direction > 0]
    fallen = [part for part in parts if part.direction < 0]
    unmoved = [part for part in parts if part.direction == 0]
    if not risen or not (fallen or (unmoved and len(risen) == 1)):
        return None
    others = [f"{_describe_part(part)} got worse" for part in fallen]
    others += [f"{_describe_part(part)} did not measurably move" for part in unmoved]
    whose = f"of {risen[0].metric} alone" if len(risen) == 1 else f"of {', '.join(part.metric for part in risen)}"
    gained = ", ".join(_describe_part(part) for part in risen)
    wanted = max((*fallen, *unmoved), key=lambda part: abs(part.weight or 0)).metric
    return (
        f"the gain is that {whose}: {gained}; {'; '.join(others)}. Read some answers of the new model; to let "
        f"{wanted} decide, set finetuning.gate.metric: {wanted}, or limit its drop with finetuning.gate.guard_metrics"
    )


def _describe_part(part: MetricChange) -> str:
    means = [arm.mean if arm is not None else None for arm in (part.before, part.after)]
    shown = " -> ".join("unknown" if mean is None else f"{mean:.3f}" for mean in means)
    return f"{part.metric} (weight {part.weight:g}) {shown}"


def _format_mean(summary: MetricSummary | None) -> str:
    if summary is not None and summary.mean is not None and summary.ci_low is None:
        return f"{summary.mean:.3f}"
    return format_interval(summary.mean, summary.ci_low, summary.ci_high) if summary else "unknown"
