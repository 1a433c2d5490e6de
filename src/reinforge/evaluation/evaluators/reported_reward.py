"""Scores what the agent itself reported, `context.reward(0.5, tests_passed=3)`, or a command's reward."""

from __future__ import annotations

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.steps import REPORTED_REWARD


class ReportedRewardConfig(EvaluatorConfig, name="reported_reward"):
    """Scores what the agent itself reported with `context.reward(value, **metrics)`, or what `workflow.reward` did."""

    metric: str = Field(default="reward", description="`reward`, or the name of another number that the agent reports.")
    failed: float | None = Field(
        default=None,
        description="Score of an episode that failed because of the policy and reported nothing, such as 0 for a "
        "share; null: the reward that finetuning.outcomes gives it.",
    )


@register_evaluator(config_type=ReportedRewardConfig)
class ReportedReward(Evaluator):
    """Reads the last report; an episode without one, or with `{"error": "..."}`, has no score."""

    is_function = True

    def __init__(self, config: ReportedRewardConfig):
        self.config, self.failed_score = config, config.failed

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        reports = [
            data.payload[REPORTED_REWARD]
            for step in item.trajectory
            if (data := step.payload.data) is not None
            and isinstance(data.payload, dict)
            and REPORTED_REWARD in data.payload
        ]
        if not reports:
            return missing_score(item, "the agent did not call context.reward(...)")
        if "error" in reports[-1]:
            return missing_score(item, reports[-1]["error"])
        if self.config.metric not in reports[-1]:
            return missing_score(item, f"context.reward(...) reported no {self.config.metric!r}")
        return EvalOutputItem(id=item.id, score=reports[-1][self.config.metric], reasoning=reports[-1])
