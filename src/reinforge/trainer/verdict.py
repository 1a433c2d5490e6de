"""The trained model against the base model: on the validations so far, and in the verdict at the end."""

from __future__ import annotations

from reinforge.evaluation.changes import compare_summaries, find_one_sided_gain
from reinforge.evaluation.splits import find_clusters
from reinforge.runs.checkpoints import copy_model
from reinforge.runs.rows import ValidationRow
from reinforge.runs.summary import RunSummary
from reinforge.runs.validations import choose_best_validation
from reinforge.trainer import stages
from reinforge.trainer.context import RunContext
from reinforge.trainer.gate import decide
from reinforge.trainer.setup.parts import Parts
from reinforge.types.evaluation import EvaluationReport, MetricSummary

MODEL = "model"
"""The folder of the promoted model."""


class BaseComparison:
    """Compares a run's models with its base and writes what it finds into the summary.

    Args:
        parts: The components of the run.
        context: Its journal, validations and checkpoints.
        summary: Its summary.
    """

    def __init__(self, parts: Parts, context: RunContext, summary: RunSummary):
        self._parts, self._context, self._summary = parts, context, summary
        self._gate = parts.config.gate

    def get_summary(self, row: ValidationRow | None) -> MetricSummary | None:
        return row.summaries.get(self._parts.gate_metric) if row is not None else None

    def find_clusters(self, *splits: str) -> dict[str, str]:
        """Returns example id -> its conversation or prompt, of those that share it with others."""
        items = [item for split in splits for item in self._parts.splits.get(split, ())]
        return find_clusters(items, self._parts.config.splits.group_key)

    def record_best_so_far(self) -> None:
        """Records the best validation of a run that ends early, and every evaluator before and then."""
        best = choose_best_validation(self._context.validations, self._gate.metric)
        if self._summary.best is None and best is not None:
            self._summary.record_best_so_far(self._context.validations[0], best, self._parts.gate_metric)
            self._compare_validations(best)

    def _compare_validations(self, after: ValidationRow) -> None:
        base = self._context.validations[0]
        self._summary.evaluators = compare_summaries(base.summaries, after.summaries, self._parts.part_weights)

    async def decide(self) -> None:
        """Compares the base with the best checkpoint on `confirm`, once, and copies the model that is promoted."""
        context, summary = self._context, self._summary
        best = choose_best_validation(context.validations, self._gate.metric)
        summary.best, summary.best_epoch = self.get_summary(best), best.epoch if best is not None else None
        if summary.num_jobs == 0:
            self._compare_validations(context.validations[-1])
            summary.promoted = False
            summary.reason = "no training job was submitted, so the base model stays"
            return
        if best is None or best.epoch == stages.BASELINE:
            self._compare_validations(context.validations[-1])
            summary.promoted = False
            summary.reason = "no checkpoint beat the base model on the select examples, so the base model stays"
            return
        base = context.validations[0]
        if not base.checkpoint or not best.checkpoint:
            self._compare_validations(best)
            summary.reason = (
                "the backend does not save its weights, so base and best cannot be compared on the confirm examples"
            )
            return
        before = await self._evaluate_arm(base, "confirm_base")
        after = await self._evaluate_arm(best, "confirm_tuned")
        clusters = self.find_clusters("confirm")
        verdict = decide(self._gate, self._parts.reward_metric, before, after, self._parts.part_weights, clusters)
        summary.evaluators = verdict.changes
        if verdict.improvement is not None and verdict.improvement.mean_difference > 0:
            warning = find_one_sided_gain(verdict.changes)
            summary.warnings += [warning] if warning is not None else []
        summary.confirm_base, summary.confirm_tuned = verdict.confirm_base, verdict.confirm_tuned
        summary.improvement, summary.promoted, summary.reason = verdict.improvement, verdict.promoted, verdict.reason
        summary.checkpoint = best.checkpoint
        context.end_stage({"promoted": verdict.promoted, "reason": verdict.reason})
        if verdict.promoted:
            copy_model(context.checkpoints.verify(best.checkpoint), context.folder / MODEL)

    async def _evaluate_arm(self, row: ValidationRow, phase: str) -> EvaluationReport:
        """Evaluates one arm on `confirm` with fresh episodes; both arms run with the same environment seeds."""
        evaluation = self._parts.trajectory_builder.evaluation
        assert evaluation is not None
        total = len(evaluation.example_ids("confirm")) * self._gate.num_samples
        self._context.begin_stage(phase.upper(), None, total)
        assert row.checkpoint is not None
        assert row.version is not None
        await self._parts.adapter.restore(self._context.checkpoints.verify(row.checkpoint), row.version)
        report = await evaluation.validate("confirm", row.epoch, phase)
        self._context.end_stage({"outcomes": report.outcomes})
        return report
