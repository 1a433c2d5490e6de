"""Evaluators of protocols: accuracy of the decision, an agent's reward, and the number of invalid replies."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score
from reinforge.interfaces import Builder, Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class VerifierAccuracyConfig(EvaluatorConfig, name="verifier_accuracy"):
    """1 if the verifier's decision is right, else 0; for a tree, the share of its dialogues that are right."""


class VerifierAccuracy(Evaluator):
    """The share of right decisions."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the share of right decisions; a dialogue without a decision counts as wrong."""
        output = _protocol_output(item)
        if output is None or output["truth"] is None:
            reason = "the output is not a protocol's" if output is None else "the example has no right decision"
            return missing_score(item, reason)
        decisions = [branch["decision"] for branch in output["branches"]]
        score = statistics.fmean(decision == output["truth"] for decision in decisions)
        return EvalOutputItem(id=item.id, score=score, reasoning=f"decided {decisions[0]}, expected {output['truth']}")


class AgentRewardConfig(EvaluatorConfig, name="agent_reward"):
    """The reward of one agent, averaged over the dialogues of an episode."""

    agent: str = Field(description="The agent's name in the protocol.")


class AgentReward(Evaluator):
    """The mean reward of one agent."""

    def __init__(self, agent: str):
        self.agent = agent

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the mean reward; the score is missing if no reward is known."""
        output = _protocol_output(item) or {"branches": []}
        known = [branch["rewards"][self.agent] for branch in output["branches"] if self.agent in branch["rewards"]]
        if not known:
            return missing_score(item, f"the reward of {self.agent} is unknown")
        return EvalOutputItem(id=item.id, score=statistics.fmean(known), reasoning=f"{len(known)} dialogues")


def _protocol_output(item: EvalInputItem) -> dict[str, Any] | None:
    output = item.output_obj
    return output if isinstance(output, dict) and "branches" in output else None


@register_evaluator(config_type=VerifierAccuracyConfig)
async def verifier_accuracy(config: VerifierAccuracyConfig, builder: Builder) -> AsyncIterator[VerifierAccuracy]:
    """Yields the evaluator."""
    yield VerifierAccuracy()


@register_evaluator(config_type=AgentRewardConfig)
async def agent_reward(config: AgentRewardConfig, builder: Builder) -> AsyncIterator[AgentReward]:
    """Yields the evaluator."""
    yield AgentReward(config.agent)


class InvalidRepliesConfig(EvaluatorConfig, name="invalid_replies"):
    """Number of invalid replies per dialogue; fewer is better."""


class InvalidReplies(Evaluator):
    """Counts the replies that the protocol rejected as invalid."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the number of invalid replies per dialogue of the episode."""
        output = _protocol_output(item)
        if output is None:
            return missing_score(item, "the output is not a protocol's")
        invalid, dialogues = output["num_invalid"], len(output["branches"])
        return EvalOutputItem(id=item.id, score=invalid / dialogues, reasoning=f"{invalid} in {dialogues} dialogues")


@register_evaluator(config_type=InvalidRepliesConfig)
async def invalid_replies(config: InvalidRepliesConfig, builder: Builder) -> AsyncIterator[InvalidReplies]:
    """Yields the evaluator."""
    yield InvalidReplies()
