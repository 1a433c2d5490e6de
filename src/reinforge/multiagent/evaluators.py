"""What a protocol is judged by: was the decision right, and what did an agent earn."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class VerifierAccuracyConfig(EvaluatorConfig, name="verifier_accuracy"):
    """1 where the verifier decided as the truth is, else 0; of a tree, the share of its dialogues."""


class VerifierAccuracy(Evaluator):
    """Compares decisions with the truth."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the share of right decisions; no decision is a wrong one."""
        output = _output(item)
        if output is None or output["truth"] is None:
            return missing(item, "no protocol's output" if output is None else "the example does not say what is right")
        decisions = [branch["decision"] for branch in output["branches"]]
        score = statistics.fmean(decision == output["truth"] for decision in decisions)
        return EvalOutputItem(id=item.id, score=score, reasoning=f"decided {decisions[0]}, right is {output['truth']}")


class AgentRewardConfig(EvaluatorConfig, name="agent_reward"):
    """What one agent earned, on average over the dialogues of an episode."""

    agent: str = Field(description="Its name in the protocol.")


class AgentReward(Evaluator):
    """Reads an agent's reward."""

    def __init__(self, agent: str):
        self.agent = agent

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns its mean reward; missing where it is not known."""
        output = _output(item) or {"branches": []}
        known = [branch["rewards"][self.agent] for branch in output["branches"] if self.agent in branch["rewards"]]
        if not known:
            return missing(item, f"nothing is known of what {self.agent} earned")
        return EvalOutputItem(id=item.id, score=statistics.fmean(known), reasoning=f"{len(known)} dialogues")


def _output(item: EvalInputItem) -> dict[str, Any] | None:
    output = item.output_obj
    return output if isinstance(output, dict) and "branches" in output else None


@register_evaluator(config_type=VerifierAccuracyConfig)
async def verifier_accuracy(config: VerifierAccuracyConfig, builder: Any) -> AsyncIterator[VerifierAccuracy]:
    """Yields the evaluator."""
    yield VerifierAccuracy()


@register_evaluator(config_type=AgentRewardConfig)
async def agent_reward(config: AgentRewardConfig, builder: Any) -> AsyncIterator[AgentReward]:
    """Yields the evaluator."""
    yield AgentReward(config.agent)


class InvalidRepliesConfig(EvaluatorConfig, name="invalid_replies"):
    """Replies of a dialogue that were refused and drawn anew; fewer is better."""


class InvalidReplies(Evaluator):
    """Counts what the protocol refused."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the number of refused replies, in a tree for each of its dialogues."""
        output = _output(item)
        if output is None:
            return missing(item, "no protocol's output")
        refused, dialogues = output["num_invalid"], len(output["branches"])
        return EvalOutputItem(id=item.id, score=refused / dialogues, reasoning=f"{refused} in {dialogues} dialogues")


@register_evaluator(config_type=InvalidRepliesConfig)
async def invalid_replies(config: InvalidRepliesConfig, builder: Any) -> AsyncIterator[InvalidReplies]:
    """Yields the evaluator."""
    yield InvalidReplies()
