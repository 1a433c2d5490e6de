"""Evaluators of protocols: accuracy of the decision, an agent's reward, and the number of invalid replies."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.evaluation.evaluators.base import missing_score
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class ProtocolEvaluator(Evaluator):
    """Base class: the score is missing if the output is not a protocol's."""

    reads_steps = False

    def __init__(self, config: Any = None):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        output = item.output_obj
        if not isinstance(output, dict) or "branches" not in output:
            return missing_score(item, "the output is not a protocol's")
        return self.score(item, output)

    @abstractmethod
    def score(self, item: EvalInputItem, output: dict[str, Any]) -> EvalOutputItem:
        """Returns the score of a `ProtocolOutput`."""


class VerifierAccuracyConfig(EvaluatorConfig, name="verifier_accuracy"):
    """1 if the verifier's decision is right, else 0; for a tree, the share of its dialogues that are right."""


@register_evaluator(config_type=VerifierAccuracyConfig)
class VerifierAccuracy(ProtocolEvaluator):
    """A dialogue without a decision counts as wrong."""

    def score(self, item: EvalInputItem, output: dict[str, Any]) -> EvalOutputItem:
        if output["truth"] is None:
            return missing_score(item, "the example has no right decision")
        decisions = [branch["decision"] for branch in output["branches"]]
        score = statistics.fmean(decision == output["truth"] for decision in decisions)
        return EvalOutputItem(id=item.id, score=score, reasoning=f"decided {decisions[0]}, expected {output['truth']}")


class AgentRewardConfig(EvaluatorConfig, name="agent_reward"):
    """The reward of one agent, averaged over the dialogues of an episode."""

    agent: str = Field(description="The agent's name in the protocol.")


@register_evaluator(config_type=AgentRewardConfig)
class AgentReward(ProtocolEvaluator):
    """The score is missing if no reward is known."""

    def score(self, item: EvalInputItem, output: dict[str, Any]) -> EvalOutputItem:
        agent = self.config.agent
        known = [branch["rewards"][agent] for branch in output["branches"] if agent in branch["rewards"]]
        if not known:
            return missing_score(item, f"the reward of {agent} is unknown")
        return EvalOutputItem(id=item.id, score=statistics.fmean(known), reasoning=f"{len(known)} dialogues")


class InvalidRepliesConfig(EvaluatorConfig, name="invalid_replies"):
    """Number of invalid replies per dialogue; fewer is better."""


@register_evaluator(config_type=InvalidRepliesConfig)
class InvalidReplies(ProtocolEvaluator):
    def score(self, item: EvalInputItem, output: dict[str, Any]) -> EvalOutputItem:
        invalid, dialogues = output["num_invalid"], len(output["branches"])
        return EvalOutputItem(id=item.id, score=invalid / dialogues, reasoning=f"{invalid} in {dialogues} dialogues")
