"""The regression set of a run, `finetuning.gate.regression`: examples that an improved model must not be worse on.

pinned.jsonl, margin 0.02, 1.000 -> 0.990 with the interval [-0.030, 0.010]  =>  not promoted
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from statistics import fmean

from reinforge.config.schema import GateConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.changes import select_scored_in_both
from reinforge.evaluation.run import REGRESSION
from reinforge.trainer.gate import judge_guard
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInputItem, EvaluationReport
from reinforge.types.workflow import BoundWorkflow

EvaluateArm = Callable[[str], Awaitable[EvaluationReport]]


async def load_regression(
    builder: ComponentBuilder, workflow: BoundWorkflow | None, splits: dict[str, list[EvalInputItem]]
) -> dict[str, list[EvalInputItem]]:
    """Returns the splits with the regression set; it may be trained on as well, since it shows no improvement."""
    pinned = builder.config.finetuning.gate.regression
    try:
        items = list((await builder.get_dataset(pinned.file)).load())
    except ConfigError as error:
        raise ConfigError(map(builder.locate, error.problems)) from None
    if workflow is not None and (problems := workflow.example_problems(items)):
        raise ConfigError(problems)
    if {str(item.id) for each in splits.values() for item in each} & {str(item.id) for item in items}:
        items = [item.copy_with_updates(id=f"{REGRESSION}:{item.id}") for item in items]
    return {**splits, REGRESSION: items}


async def judge_regression(
    gate: GateConfig, metric: str, base: EvaluateArm, tuned: EvaluateArm
) -> tuple[bool | None, str]:
    """Returns whether the metric has not dropped on the regression set by more than the margin, and the figures.

    Args:
        base: Evaluates the base model on the split, in a phase with this name; so does `tuned`.
    """
    assert gate.regression is not None
    arms = await base("regression_base"), await tuned("regression_tuned")
    means = " -> ".join(f"{fmean(each.values()):.3f}" for each in select_scored_in_both(metric, *arms) if each)
    name = f"{metric} on the regression set {gate.regression.file.name} ({means or 'no score'})"
    found = judge_guard(metric, gate.regression.margin, gate, arms, name)
    return found.passed, f"; {'' if found.passed else 'but '}{found.reason}"
