"""Evaluators of a ticket: all fields right, share of right fields, share of valid answers, and training reward."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.tasks.tickets.ticket import FIELDS, count_correct_fields, format_ticket
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class TicketEvaluator(Evaluator):
    """Base class: scores the ticket that the agent filed; without an output the score is missing."""

    reads_steps = False

    def __init__(self, config: Any = None):
        self.config = config

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        filed = item.output_obj
        if not isinstance(filed, dict) or "num_answers" not in filed:
            return EvalOutputItem(id=item.id, score=None, reasoning=None, error="the agent filed nothing")
        expected = item.expected_output_obj
        ticket = "no valid ticket" if filed["ticket"] is None else format_ticket(filed["ticket"])
        count = filed["num_answers"]
        reason = f"{ticket} after {count} answer{'s' * (count > 1)}, expected {format_ticket(expected)}"
        return EvalOutputItem(id=item.id, score=self.score(filed, expected), reasoning=reason)

    @abstractmethod
    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns the score of `{"ticket": ..., "num_answers": ...}`; the ticket is valid or None."""


def compute_field_accuracy(filed: dict[str, Any], expected: dict[str, Any]) -> float:
    return count_correct_fields(filed["ticket"], expected) / len(FIELDS) if filed["ticket"] is not None else 0.0


class TicketExactConfig(EvaluatorConfig, name="tickets_exact"):
    """1 if every field is right, else 0."""


@register_evaluator(config_type=TicketExactConfig)
class TicketExact(TicketEvaluator):
    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        return float(filed["ticket"] == expected)


class TicketFieldsConfig(EvaluatorConfig, name="tickets_fields"):
    """Share of the fields that are right."""


@register_evaluator(config_type=TicketFieldsConfig)
class TicketFields(TicketEvaluator):
    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        return compute_field_accuracy(filed, expected)


class TicketSchemaConfig(EvaluatorConfig, name="tickets_schema"):
    """Share of the agent's answers that are valid tickets."""


@register_evaluator(config_type=TicketSchemaConfig)
class TicketSchema(TicketEvaluator):
    """The share of valid answers: 1.0 at once, 0.5 after a correction, 0.0 never."""

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        return float(filed["ticket"] is not None) / filed["num_answers"]


class TicketRewardConfig(EvaluatorConfig, name="tickets_reward"):
    """The training reward; two invalid answers end the episode with `finetuning.outcomes.policy_error` instead."""

    exact: float = Field(default=0.5, ge=0, description="Reward for all fields right.")
    fields: float = Field(default=0.5, ge=0, description="Reward per share of right fields.")
    correction: float = Field(default=0.2, ge=0, description="Penalty for an invalid first answer.")


@register_evaluator(config_type=TicketRewardConfig)
class TicketReward(TicketEvaluator):
    """`exact * [all right] + fields * share right - correction * [first answer invalid]`."""

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Example, with the defaults: all right at once -> 1.0, after a correction -> 0.8; three of four -> 0.375."""
        config, is_exact = self.config, filed["ticket"] == expected
        reward = config.exact * is_exact + config.fields * compute_field_accuracy(filed, expected)
        return reward - config.correction * (filed["num_answers"] - 1)
