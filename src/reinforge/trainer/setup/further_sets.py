"""Examples beside `confirm` that a verdict asks: tasks that were not trained, and what must not become worse.

pinned.jsonl, margin 0.02, 1.000 -> 0.990 with the interval [-0.030, 0.010]  =>  not promoted
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from reinforge.config.schema import GateConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.changes import select_scored_in_both
from reinforge.evaluation.non_inferiority import NonInferiority
from reinforge.evaluation.reference import GuardResult, compare_transfer, evaluate_reference, list_losses
from reinforge.evaluation.run import REGRESSION, DatasetEvaluation
from reinforge.evaluation.statistics import Improvement, compute_paired_difference
from reinforge.trainer.context import RunContext
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInputItem, EvaluationReport
from reinforge.types.workflow import BoundWorkflow

EvaluateArm = Callable[[str], Awaitable[EvaluationReport]]
"""Evaluates one of the two models on the set, in a phase with this name."""


async def load_regression(
    builder: ComponentBuilder, workflow: BoundWorkflow | None, splits: dict[str, list[EvalInputItem]]
) -> dict[str, list[EvalInputItem]]:
    """Returns the splits with the regression set; it may be trained on as well, since it shows no improvement."""
    try:
        items = list((await builder.get_dataset(builder.config.finetuning.gate.regression)).load())
    except ConfigError as error:
        raise ConfigError(map(builder.locate, error.problems)) from None
    if workflow is not None and (problems := workflow.example_problems(items)):
        raise ConfigError(problems)
    if {str(item.id) for each in splits.values() for item in each} & {str(item.id) for item in items}:
        items = [item.copy_with_updates(id=f"{REGRESSION}:{item.id}") for item in items]
    return {**splits, REGRESSION: items}


async def judge_regression(
    gate: GateConfig, metric: str, arms: Sequence[EvaluateArm], judge: Callable[..., GuardResult]
) -> tuple[bool | None, str]:
    """Returns whether the metric has not dropped on the regression set by more than the margin, and the figures.

    Args:
        judge: Judges a guard metric.
    """
    assert gate.regression is not None
    reports = await arms[0]("regression_base"), await arms[1]("regression_tuned")
    means = " -> ".join(f"{fmean(each.values()):.3f}" for each in select_scored_in_both(metric, *reports) if each)
    name = f"{metric} on the regression set {gate.regression.name} ({means or 'no score'})"
    found = judge(metric, gate.regression_margin, gate, reports, name)
    return found.passed, f"; {'' if found.passed else 'but '}{found.reason}"


async def measure_transfer(
    metric: str, arms: Sequence[EvaluateArm], items: Sequence[EvalInputItem]
) -> tuple[dict[str, Improvement], EvaluationReport]:
    """Returns how the models differ on tasks that were not trained, and the report of the second one."""
    before, after = await arms[0]("transfer_base"), await arms[1]("transfer_tuned")
    tasks: dict[str, Any] = {str(item.id): str(item.full_dataset_entry["task"]) for item in items}
    return compare_tasks(metric, before, after, tasks), after


async def judge_transfer(
    context: RunContext,
    gate: GateConfig,
    metric: str,
    evaluation: DatasetEvaluation,
    found: NonInferiority,
    report: EvaluationReport,
) -> tuple[NonInferiority, list[str]]:
    """Compares a model with the reference on examples that were kept apart; returns warnings where it loses more."""
    items = evaluation.examples("transfer")
    context.begin_stage("TRANSFER_REFERENCE", None, len(items))
    reference = await evaluate_reference(evaluation, str(gate.reference), "transfer", "transfer_reference")
    context.end_stage({"outcomes": reference.outcomes})
    judged = compare_transfer(found, metric, reference, report, items)
    return judged, list_losses(judged)


def compare_tasks(
    metric: str, before: EvaluationReport, after: EvaluationReport, tasks: Mapping[str, str]
) -> dict[str, Improvement]:
    """Returns the change of each task; the intervals hold for all tasks together (Bonferroni).

    Args:
        tasks: Example id -> its task.
    """
    base_scores, tuned_scores = select_scored_in_both(metric, before, after)
    names = dict.fromkeys(tasks.values())
    found = {}
    for name in names:
        base = {id_: score for id_, score in base_scores.items() if tasks[id_] == name}
        tuned = {id_: score for id_, score in tuned_scores.items() if tasks[id_] == name}
        if base:
            level = 1 - 0.05 / len(names)
            found[name] = compute_paired_difference(base, tuned, level=level, clusters=before.clusters)
    return found
