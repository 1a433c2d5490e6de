"""What a ticket is worth: all fields right, the share of right fields, the schema met, and the training reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.interfaces import Evaluator
from reinforge.registry import register_evaluator
from reinforge.tasks.tickets.ticket import FIELDS, num_right, write_ticket
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class TicketEvaluator(Evaluator):
    """Base: looks at what the agent filed; without that the score is missing."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one e-mail."""
        filed = item.output_obj
        if not isinstance(filed, dict) or "num_answers" not in filed:
            return EvalOutputItem(id=item.id, score=None, reasoning=None, error="the agent filed nothing")
        expected = item.expected_output_obj
        ticket = "no valid ticket" if filed["ticket"] is None else write_ticket(filed["ticket"])
        count = filed["num_answers"]
        reason = f"{ticket} after {count} answer{'s' * (count > 1)}, expected {write_ticket(expected)}"
        return EvalOutputItem(id=item.id, score=self.score(filed, expected), reasoning=reason)

    @abstractmethod
    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns the score of `{"ticket": ..., "num_answers": ...}`; the ticket is valid or None."""


def share_right(filed: dict[str, Any], expected: dict[str, Any]) -> float:
    """Returns right fields / fields; 0.0 without a ticket."""
    return num_right(filed["ticket"], expected) / len(FIELDS) if filed["ticket"] is not None else 0.0


class ExactConfig(EvaluatorConfig, name="tickets_exact"):
    """1 where every field is right, else 0."""


class Exact(TicketEvaluator):
    """All fields right."""

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns 1.0 or 0.0."""
        return float(filed["ticket"] == expected)


class FieldsConfig(EvaluatorConfig, name="tickets_fields"):
    """Share of the fields that are right."""


class Fields(TicketEvaluator):
    """The share of right fields."""

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns 0, 0.25, ... 1; 0.0 without a valid ticket."""
        return share_right(filed, expected)


class SchemaConfig(EvaluatorConfig, name="tickets_schema"):
    """Share of the agent's answers that met the schema."""


class Schema(TicketEvaluator):
    """The share of valid answers: 1.0 at once, 0.5 after a correction, 0.0 never."""

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns valid answers / answers."""
        return float(filed["ticket"] is not None) / filed["num_answers"]


class RewardConfig(EvaluatorConfig, name="tickets_reward"):
    """The training reward; two invalid answers end the episode with `finetuning.outcomes.policy_error` instead."""

    exact: float = Field(default=0.5, ge=0, description="For all fields right.")
    fields: float = Field(default=0.5, ge=0, description="Times the share of right fields.")
    correction: float = Field(default=0.2, ge=0, description="What an invalid first answer takes away.")


class Reward(TicketEvaluator):
    """`exact * [all right] + fields * share right - correction * [first answer invalid]`."""

    def __init__(self, config: RewardConfig):
        self.config = config

    def score(self, filed: dict[str, Any], expected: dict[str, Any]) -> float:
        """Returns the reward.

        Example, with the defaults: all right at once -> 1.0; three of four -> 0.375; all right after a correction
        -> 0.8.
        """
        right = self.config.exact * (filed["ticket"] == expected) + self.config.fields * share_right(filed, expected)
        return right - self.config.correction * (filed["num_answers"] - 1)


@register_evaluator(config_type=ExactConfig)
async def tickets_exact(config: ExactConfig, builder: Any) -> AsyncIterator[Exact]:
    """Yields the share of e-mails filed without a fault."""
    yield Exact()


@register_evaluator(config_type=FieldsConfig)
async def tickets_fields(config: FieldsConfig, builder: Any) -> AsyncIterator[Fields]:
    """Yields the share of right fields."""
    yield Fields()


@register_evaluator(config_type=SchemaConfig)
async def tickets_schema(config: SchemaConfig, builder: Any) -> AsyncIterator[Schema]:
    """Yields the share of valid answers."""
    yield Schema()


@register_evaluator(config_type=RewardConfig)
async def tickets_reward(config: RewardConfig, builder: Any) -> AsyncIterator[Reward]:
    """Yields the training reward."""
    yield Reward(config)
