"""The verdict of a run: whether the best checkpoint replaces the base model.

    validations on `select`, one each epoch  --choose_best_validation-->  one candidate
    base and candidate, fresh on `confirm`   --decide------->  promoted: True, False, or None for no verdict

The best of many noisy scores looks better than it is. The verdict avoids that: `confirm` is used once, for one
candidate, with fresh episodes of both arms. Without any effect at most 2.5 % of runs promote (the upper half of a 95 %
interval); `tests/core/numerics/test_gate_simulation.py` checks that the whole selection stays below 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from reinforge.config.schema import FinetuneConfig, GateConfig
from reinforge.errors import Problem
from reinforge.evaluation.changes import (
    MetricChange,
    compare_reports,
    compare_summaries,
    find_one_sided_gain,
    select_scored_in_both,
    summarize_arm,
)
from reinforge.evaluation.run import REGRESSION, DatasetEvaluation
from reinforge.evaluation.statistics import (
    MAX_P_VALUE,
    Improvement,
    compute_half_width,
    compute_paired_difference,
    count_independent,
    list_names,
)
from reinforge.runs.checkpoints import copy_model, restore_weights
from reinforge.runs.rows import ValidationRow, choose_best_validation
from reinforge.runs.summary import RunSummary
from reinforge.trainer import versions
from reinforge.trainer.context import RunContext
from reinforge.trainer.setup.parts import Parts
from reinforge.types.evaluation import EvalInputItem, EvaluationReport, MetricSummary, count_examples

Arms = tuple[EvaluationReport, EvaluationReport]

ASSUMPTION = "for scores of 0 and 1 that change on a quarter of the examples"
WIDE = 0.1  # above this, the smallest improvement that can be shown comes with the advice how to lower it
MIN_PAIRS = 6  # 2 / 2^6 <= 0.05 < 2 / 2^5


@dataclass(frozen=True, slots=True)
class Guard:
    """The result of one guard metric."""

    metric: str
    allowed_loss: float  # the interval must lie above minus this
    improvement: Improvement | None  # tuned minus base; None if fewer than two examples are scored in both arms
    passed: bool | None  # None: unknown
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the tuned model replaces the base, and why."""

    promoted: bool | None  # None: no verdict
    reason: str
    improvement: Improvement | None = None  # tuned minus base on the gate metric
    confirm_base: MetricSummary | None = None  # the two arms, over the examples scored in both
    confirm_tuned: MetricSummary | None = None
    guards: list[Guard] = field(default_factory=list)
    changes: list[MetricChange] = field(default_factory=list)


def decide(
    gate: GateConfig,
    reward_metric: str,
    base: EvaluationReport,
    tuned: EvaluationReport,
    weights: Mapping[str, float] | None = None,
) -> Verdict:
    """Returns the verdict on the tuned model from fresh episodes of both arms on `confirm`.

    Promoted only if the 95 % interval of tuned minus base lies above the margin, the sign-flip test agrees
    (p <= 0.05), and the interval of every guard metric lies above minus its allowed loss. An example that is missing in
    one arm is dropped for both.

    Args:
        weights: Weight of each part of the metric; None: it is not `weighted`.
    """
    metric = gate.metric or reward_metric
    changes = compare_reports(base, tuned, weights or {})
    base_scores, tuned_scores = select_scored_in_both(metric, base, tuned)
    base_arm = summarize_arm(metric, base, base_scores, tuned)
    tuned_arm = summarize_arm(metric, tuned, tuned_scores, base)
    if problem := _find_obstacle(gate, metric, (base, tuned)):
        improvement = (
            compute_paired_difference(base_scores, tuned_scores, gate.smallest_gain, clusters=base.clusters)
            if len(base_scores) > 1
            else None
        )
        return Verdict(None, problem, improvement, base_arm, tuned_arm, changes=changes)
    improvement = compute_paired_difference(base_scores, tuned_scores, gate.smallest_gain, clusters=base.clusters)
    guards = [_judge_guard(name, loss, gate, (base, tuned)) for name, loss in gate.guard_metrics.items()]
    cleared, reason = _judge_improvement(gate, improvement, unchanged=base_scores == tuned_scores)
    failed_guards = [guard for guard in guards if guard.passed is False] or [g for g in guards if g.passed is None]
    promoted: bool | None = cleared
    if cleared and failed_guards:
        promoted = failed_guards[0].passed
        reason = f"{metric} improved, but {'; '.join(guard.reason for guard in failed_guards)}"
    return Verdict(promoted, reason, improvement, base_arm, tuned_arm, guards, changes)


def describe_power(gate: GateConfig, names: Sequence[str]) -> str:
    """Returns, before a run, how small an improvement its verdict can show; see `compute_half_width`.

    Example: 20 examples -> `20 confirm examples cannot show less than ±0.24 (for scores of 0 and 1 ...`.

    Args:
        names: The cluster of each confirm example (`list_names`).
    """
    num_clusters = len(set(names))
    count, independent = count_examples(len(names), num_clusters).replace(" ", " confirm ", 1), count_independent(names)
    if num_clusters < MIN_PAIRS:
        return f"{count}: fewer than {MIN_PAIRS} can never show an improvement"
    samples = f", {gate.num_samples} episodes each," if gate.num_samples > 1 else ""
    if gate.reference is not None:
        half = compute_half_width(independent, gate.num_samples)
        wanted = f"not worse than {gate.reference} needs one above -{gate.margin:g}"
        return f"{count}{samples} give an interval of ±{half:.2f} ({ASSUMPTION}); {wanted}"
    smallest = compute_half_width(independent, gate.num_samples) + max(0.0, gate.smallest_gain)
    margin = f", with the margin {gate.smallest_gain:g}" if gate.smallest_gain > 0 else ""
    wide = "; more examples or a larger finetuning.gate.num_samples can show less" if smallest > WIDE else ""
    return f"{count}{samples} cannot show less than ±{smallest:.2f} ({ASSUMPTION}{margin}){wide}"


def refuse_no_verdict(
    config: FinetuneConfig, splits: Mapping[str, Sequence[EvalInputItem]], clusters: Mapping[str, str]
) -> list[Problem]:
    """Returns the problem of a run whose verdict can never show an improvement, unless the run asks for it."""
    names = {split: set(list_names((str(item.id) for item in items), clusters)) for split, items in splits.items()}
    if config.gate.allow_no_verdict or len(names["confirm"]) >= MIN_PAIRS:
        return []
    text = describe_power(config.gate, list_names((str(item.id) for item in splits["confirm"]), clusters))
    smallest, total = MIN_PAIRS + len(splits) - 1, sum(map(len, names.values()))
    more = f"add examples, {smallest} with different prompts at least, and " if total < smallest else ""
    way = f"set finetuning.splits.confirm: {MIN_PAIRS} or more"
    if config.splits.key is not None:
        way = f"give {MIN_PAIRS} or more with different prompts to confirm ({config.splits.key})"
    ask = "or train without a verdict: finetuning.gate.allow_no_verdict: true (--allow_no_verdict)"
    return [Problem("finetuning.splits", f"{text}, so the run does not start", f"{more}{way}; {ask}")]


def _find_obstacle(gate: GateConfig, metric: str, arms: Arms, names: tuple[str, str] = ("base", "tuned")) -> str:
    base, tuned = arms
    for arm, report in zip(names, arms, strict=True):
        if report.error:
            return f"the evaluation of the {arm} model failed: {report.error}"
        if metric not in report.scores:
            known = ", ".join(sorted(report.scores)) or "nothing"
            return f"{metric} was not scored for the {arm} model (scored: {known})"
    total = max(base.num_examples, tuned.num_examples)
    pairs = select_scored_in_both(metric, base, tuned)[0]
    num_pairs, why = len(pairs), summarize_arm(metric, base, pairs, tuned).unscored_reason
    because = f"; the most common reason: {why}" if why else ""
    if num_pairs < 2:
        few = f"only {num_pairs} of {total} examples have a score of {metric} for both models; at least 2 are needed"
        return few + because
    if len(set(list_names(pairs, base.clusters))) < 2:
        of_one = f"the {num_pairs} examples share one conversation (finetuning.splits.group_key) or prompt"
        return f"{of_one}; at least 2 are needed"
    missing = (total - num_pairs) / total
    if missing > gate.max_missing:
        return (
            f"{total - num_pairs} of {total} confirm examples ({missing:.0%}) are missing in at least one arm, "
            f"more than the {gate.max_missing:.0%} that gate.max_missing allows{because}"
        )
    return ""


def _judge_improvement(gate: GateConfig, improvement: Improvement, *, unchanged: bool) -> tuple[bool, str]:
    low, high = improvement.ci_low, improvement.ci_high
    pairs = count_examples(improvement.num_pairs, improvement.num_clusters)
    mean = f"{improvement.mean_difference:+.3f}"
    if low is None or high is None or (unchanged and low <= gate.smallest_gain):
        return False, f"each of the {pairs} has the same score before and after"
    interval = _format_ends(low, high)
    if low <= gate.smallest_gain:
        if high < 0:
            return False, f"the new model is worse: the interval of the difference {interval} lies below 0"
        if low <= 0 <= gate.smallest_gain:
            return False, f"the interval of the improvement {interval} includes 0 ({mean} on {pairs})"
        return False, f"the interval of the improvement {interval} does not lie above the margin {gate.smallest_gain:g}"
    if improvement.p_value > MAX_P_VALUE:
        num_clusters = improvement.num_clusters or improvement.num_pairs
        noun = "examples" if num_clusters == improvement.num_pairs else "prompts"
        few = f"; fewer than {MIN_PAIRS} {noun} can never reach that" if num_clusters < MIN_PAIRS else ""
        return False, (
            f"the improvement {mean} may be due to chance: the sign-flip test over {pairs} gives "
            f"p = {improvement.p_value:.2g}, which must be at most {MAX_P_VALUE:g}{few}"
        )
    above = f"the margin {gate.smallest_gain:g}" if gate.smallest_gain else "0"
    return True, f"the interval of the improvement {interval} lies above {above} ({mean} on {pairs})"


def _judge_guard(metric: str, allowed: float, gate: GateConfig, arms: Arms, name: str = "") -> Guard:
    name = name or f"guard metric {metric}"
    if problem := _find_obstacle(gate, metric, arms):
        return Guard(metric, allowed, None, None, f"{name} could not be checked: {problem}")
    change = compute_paired_difference(*select_scored_in_both(metric, *arms), clusters=arms[0].clusters)
    if change.ci_low is None or change.ci_high is None:  # all scores are equal in both arms
        return Guard(metric, allowed, change, True, f"{name} did not change on any example")
    interval = _format_ends(change.ci_low, change.ci_high)
    of_change = f"the interval of its change is {interval}"
    if change.ci_low > -allowed:
        return Guard(metric, allowed, change, True, f"{name} passed: {of_change}, above {-allowed:g}")
    if change.mean_difference < 0:
        reason = f"{name} may have dropped by more than {allowed:g}: {of_change}"
    else:
        few = f"{count_examples(change.num_pairs, change.num_clusters)} are too few to rule out"
        reason = f"{few} that {name} dropped by more than {allowed:g}: {of_change}"
    return Guard(metric, allowed, change, False, reason)


def _format_ends(low: float, high: float) -> str:
    digits = next((d for d in (2, 3, 4) if all(round(x, d) != 0 or x == 0 for x in (low, high))), 5)
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


MODEL = "model"  # the folder of the promoted model


class BaseComparison:
    """Compares a run's models with its base and writes what it finds into the summary."""

    def __init__(self, parts: Parts, context: RunContext, summary: RunSummary):
        self._parts, self._context, self._summary = parts, context, summary
        self._gate = parts.config.gate

    def get_summary(self, row: ValidationRow | None) -> MetricSummary | None:
        return row.summaries.get(self._parts.gate_metric) if row is not None else None

    def record_best_so_far(self) -> None:
        best = choose_best_validation(self._context.validations, self._gate.metric)
        if self._summary.best is None and best is not None:
            self._summary.record_best_so_far(self._context.validations, best, self._parts.gate_metric)
            self._compare_validations(best)

    def _compare_validations(self, after: ValidationRow) -> None:
        base = self._context.validations[0]
        self._summary.evaluators = compare_summaries(base.summaries, after.summaries, self._parts.part_weights)

    async def decide(self) -> None:
        """Compares the base with the best checkpoint on `confirm`, once, and copies the model that is promoted."""
        context, summary = self._context, self._summary
        best = choose_best_validation(context.validations, self._gate.metric)
        summary.best, summary.best_epoch = self.get_summary(best), best.epoch if best is not None else None
        if summary.num_jobs == 0 or best is None or best.epoch == versions.BASELINE:
            self._compare_validations(context.validations[-1])
            lack = "no checkpoint beat the base model on the select examples"
            why = "no training job was submitted" if summary.num_jobs == 0 else lack
            summary.promoted, summary.reason = False, f"{why}, so the base model stays"
            if self._gate.reference is not None:
                summary.reason += f"; the untouched base model: {await self._judge_base(context.validations[0])}"
            return
        base = context.validations[0]
        if not base.checkpoint or not best.checkpoint:
            self._compare_validations(best)
            summary.reason = (
                "the backend does not save its weights, so base and best cannot be compared on the confirm examples"
            )
            return
        summary.checkpoint = best.checkpoint
        before = await self._evaluate_arm(base, "confirm_base")
        after = await self._evaluate_arm(best, "confirm_tuned")
        verdict = decide(self._gate, self._parts.reward_metric, before, after, self._parts.part_weights)
        summary.evaluators = verdict.changes
        if verdict.improvement is not None and verdict.improvement.mean_difference > 0:
            warning = find_one_sided_gain(verdict.changes)
            summary.warnings += [warning] if warning is not None else []
        summary.confirm_base, summary.confirm_tuned = verdict.confirm_base, verdict.confirm_tuned
        summary.improvement, summary.promoted, summary.reason = verdict.improvement, verdict.promoted, verdict.reason
        if self._gate.reference is not None:
            summary.promoted, summary.reason = await self._judge_against_reference(after, "tuned", verdict.guards)
        arms = [partial(self._evaluate_arm, row) for row in (base, best)]
        if summary.promoted and self._gate.regression is not None:
            from reinforge.trainer.setup.further_sets import judge_regression  # where there is one

            pinned = [partial(arm, split=REGRESSION) for arm in arms]
            summary.promoted, why = await judge_regression(self._gate, self._parts.gate_metric, pinned, _judge_guard)
            summary.reason += why
        if (transfer := self._parts.splits.get("transfer")) is not None:
            from reinforge.trainer.setup.further_sets import measure_transfer

            others = [partial(arm, split="transfer") for arm in arms]
            summary.transfer, report = await measure_transfer(self._parts.gate_metric, others, transfer)
            await self._judge_transfer(report)
        context.end_stage({"promoted": summary.promoted, "reason": summary.reason})
        if summary.promoted:
            copy_model(context.checkpoints.verify(best.checkpoint), context.folder / MODEL)

    async def _judge_base(self, base: ValidationRow) -> str:
        """Compares the base with the reference where no checkpoint is better; returns what was found."""
        if not base.checkpoint:
            return f"not compared with {self._gate.reference}, since the backend does not save its weights"
        report = await self._evaluate_arm(base, "confirm_base")
        self._summary.confirm_base = report.summaries.get(self._parts.gate_metric)
        reason = (await self._judge_against_reference(report, "base"))[1]
        if "transfer" in self._parts.splits:
            await self._judge_transfer(await self._evaluate_arm(base, "transfer_base", "transfer"))
        return reason

    async def _judge_against_reference(
        self, report: EvaluationReport, arm: str, guards: Sequence[Guard] = ()
    ) -> tuple[bool | None, str]:
        """Runs the reference on `confirm`, and lets the loss of a model against it decide."""
        from reinforge.evaluation.reference import compare_with_reference, decide_promotion, evaluate_reference

        summary, evaluation, metric = self._summary, self._parts.trajectory_builder.evaluation, self._parts.gate_metric
        assert isinstance(evaluation, DatasetEvaluation)
        self._context.begin_stage("CONFIRM_REFERENCE", None, len(evaluation.example_ids("confirm")))
        reference = await evaluate_reference(evaluation, str(self._gate.reference))
        self._context.end_stage({"outcomes": reference.outcomes})
        if problem := _find_obstacle(self._gate, metric, (reference, report), ("reference", arm)):
            return None, problem
        found = compare_with_reference(self._gate, metric, reference, report, evaluation.examples("confirm"))
        summary.non_inferiority = found
        summary.warnings += [f"{name}: {each}" for name, each in found.slices.items() if each.outcome == "worse"]
        return decide_promotion(found, guards)

    async def _judge_transfer(self, report: EvaluationReport) -> None:
        evaluation = self._parts.trajectory_builder.evaluation
        if (found := self._summary.non_inferiority) is None:
            return
        from reinforge.trainer.setup.further_sets import judge_transfer

        assert isinstance(evaluation, DatasetEvaluation)
        judged = await judge_transfer(self._context, self._gate, self._parts.gate_metric, evaluation, found, report)
        self._summary.non_inferiority, losses = judged
        self._summary.warnings += losses

    async def _evaluate_arm(self, row: ValidationRow, phase: str, split: str = "confirm") -> EvaluationReport:
        """Evaluates one arm on a split with fresh episodes; both arms run with the same environment seeds."""
        evaluation = self._parts.trajectory_builder.evaluation
        assert evaluation is not None
        num_samples = self._gate.num_samples if split == "confirm" else 1
        total = len(evaluation.example_ids(split)) * num_samples
        self._context.begin_stage(phase.upper(), None, total)
        assert row.checkpoint is not None
        assert row.version is not None
        await restore_weights(self._parts.adapter, self._context.checkpoints.verify(row.checkpoint), row.version)
        report = await evaluation.validate(split, row.epoch, phase)
        self._context.end_stage({"outcomes": report.outcomes})
        return report
