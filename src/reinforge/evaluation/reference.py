"""The reference of a verdict: what `finetuning.gate.reference` names answers the confirm examples once.

    logs         the reply that each row records, scored as an answer of the agent
    llms.NAME    the agent runs with this entry in place of the policy

The verdict is then non-inferiority: the trained model is promoted if it is not worse than the reference by more than
the margin. The episodes are in the journal as `confirm_reference`, so a run that resumes asks for none of them twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from reinforge.config.schema import GateConfig
from reinforge.config.sections import LOGS
from reinforge.errors import Problem
from reinforge.evaluation.changes import select_scored_in_both
from reinforge.evaluation.non_inferiority import NonInferiority, judge_non_inferiority, judge_with_slices
from reinforge.evaluation.opponents import BASELINE
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.evaluation.statistics import format_interval
from reinforge.rollout.context import EpisodeContext
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalInputItem, EvaluationReport

PHASE = "confirm_reference"


def compare_with_reference(
    gate: GateConfig,
    metric: str,
    reference: EvaluationReport,
    student: EvaluationReport,
    items: Sequence[EvalInputItem],
) -> NonInferiority:
    """Returns whether a model is not worse than the reference, over the examples that both have a score on."""
    name = "the logs" if gate.reference == LOGS else str(gate.reference)
    scores, own = select_scored_in_both(metric, reference, student)
    return judge_with_slices(own, scores, student.clusters, gate.margin, items, name)


def compare_transfer(
    found: NonInferiority,
    metric: str,
    reference: EvaluationReport,
    student: EvaluationReport,
    items: Sequence[EvalInputItem],
) -> NonInferiority:
    """Returns what was found on `confirm`, with the outcome on each task of examples that were kept apart."""
    scores, own = select_scored_in_both(metric, reference, student)
    ids = {str(item.id): str(item.full_dataset_entry["task"]) for item in items if str(item.id) in own}
    transfer = {}
    for task in dict.fromkeys(ids.values()):
        tuned, other = ({id_: each[id_] for id_ in ids if ids[id_] == task} for each in (own, scores))
        if len(tuned) > 1:
            judged = judge_non_inferiority(tuned, other, student.clusters, found.margin)
            transfer[task] = replace(judged, reference=found.reference)
    return replace(found, transfer=transfer)


def list_losses(found: NonInferiority) -> list[str]:
    """Returns a sentence for each task on which more than the margin is lost, compared with the confirm examples."""
    changes = {task: each.subtract(found) for task, each in found.transfer.items()}
    return [
        f"{task}: compared with {found.reference}, the model is worse there than on the confirm examples, by "
        f"{format_interval(*change, signed=True)}; more than the margin {found.margin:g}"
        for task, change in changes.items()
        if change[0] < -found.margin
    ]


class GuardResult(Protocol):
    """What a guard metric of the verdict found."""

    @property
    def passed(self) -> bool | None: ...

    @property
    def reason(self) -> str: ...


def decide_promotion(found: NonInferiority, guards: Sequence[GuardResult]) -> tuple[bool | None, str]:
    """Returns whether the model is promoted, and why: it is not worse than the reference, and the guards hold."""
    failed = [guard for guard in guards if not guard.passed] if found.outcome == "not worse" else []
    promoted = failed[0].passed if failed else found.outcome == "not worse"
    return promoted, "; ".join([str(found), *(f"but {guard.reason}" for guard in failed)])


async def evaluate_reference(
    evaluation: DatasetEvaluation, reference: str, split: str = "confirm", phase: str = PHASE
) -> EvaluationReport:
    """Returns the scores of the reference on the examples of a split, from one episode of each."""
    runner, other = copy(evaluation.runner), copy(evaluation)
    if reference == LOGS:
        replies = {str(item.id): read_recorded_reply(item) for item in evaluation.examples(split)}

        async def replay(item: EvalInputItem, llm: Any, context: EpisodeContext) -> Any:
            return replies[str(item.id)]

        runner.workflow = bind_workflow(replay, evaluation.runner.workflow.llm)
    else:
        model = runner.llms[reference.removeprefix("llms.")]
        runner.llms = {name: model if llm.is_policy else llm for name, llm in runner.llms.items()}
    other.runner = runner
    keys = [EpisodeKey(phase, BASELINE, example) for example in evaluation.example_ids(split)]
    return other.report(split, BASELINE, await other.collect(keys))


def read_recorded_reply(item: EvalInputItem) -> Any:
    """Returns the last assistant message of a row, or else its completion or expected answer; None: it has none.

    A reply without text, such as a tool call, is returned as a list of its message, like an expected answer.
    """
    row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        return read_reply(last)
    completion = row.get("completion")
    return completion if isinstance(completion, str) else item.expected_output_obj


def read_reply(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    return content if isinstance(content, str) and content else [dict(message)]


def find_reference_problems(gate: GateConfig, items: Sequence[EvalInputItem]) -> list[Problem]:
    """Returns the problem of confirm examples without a recorded reply to compare with."""
    without = [str(item.id) for item in items if read_recorded_reply(item) is None]
    if gate.reference != LOGS or not without:
        return []
    message = f"{len(without)} of {len(items)} confirm examples record no reply, such as {without[0]}"
    fix = "leave these rows out, or name the model that answers them: `reference: llms.NAME`"
    return [Problem("finetuning.gate.reference", message, fix)]
