"""A team: roles speak one after the other, and an evaluator scores the answer.

    roles: [planner, worker, critic]     in this order, `passes` times
    hears: {critic: [worker]}            the critic does not see the plan; roles not listed here hear all others
    answer: worker                       the worker's last message is the team's answer
    evaluator: solved                    an entry of eval.evaluators scores it
    role_rewards: {critic: 0.5}          the critic earns half of the score, the other roles all of it

The team of MALT (arXiv:2412.01928) is `roles: [generator, verifier, refiner]` with `num_responses: 3`.

Differs from the paper: a reply's value, the mean score of the answers that follow from it, is not rounded to 0 or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from reinforge.errors import ConfigError, EvaluationError, Problem, did_you_mean
from reinforge.evaluation.evaluators.base import score_item
from reinforge.interfaces import Builder, Evaluator
from reinforge.multiagent.dialogue import Dialogue, Step
from reinforge.multiagent.protocol import DialogueConfig, ProtocolHandler, Turn
from reinforge.multiagent.registration import register_protocol


class RolesConfig(DialogueConfig, name="roles"):
    """A team of roles whose answer is scored by an evaluator."""

    roles: list[str] = Field(min_length=1, description="The roles in speaking order; a role may occur more than once.")
    hears: dict[str, list[str]] = Field(
        default_factory=dict, description="The roles that a role hears; roles not listed here hear all others."
    )
    passes: int = Field(default=1, ge=1, description="How many times the roles speak in this order.")
    answer: str | None = Field(default=None, description="Role whose last message is the answer; null: the last role.")
    evaluator: str = Field(description="Entry of eval.evaluators that scores the answer.")
    role_rewards: dict[str, float] = Field(
        default_factory=dict, description="A role's reward is the score times this factor; default 1."
    )

    @model_validator(mode="after")
    def _roles_are_known(self) -> RolesConfig:
        named = {"answer": [self.answer] if self.answer is not None else [], "role_rewards": list(self.role_rewards)}
        named["hears"] = [*self.hears, *(name for heard in self.hears.values() for name in heard)]
        for key, names in named.items():
            for name in names:
                if name not in self.roles:
                    hint = did_you_mean(name, self.roles) or ";"
                    raise ValueError(f'{key}: unknown role "{name}"{hint} roles: {", ".join(self.roles)}')
        return self


@register_protocol(RolesConfig)
class Roles(ProtocolHandler):
    config: RolesConfig  # type: ignore[assignment]  # a team has no decision, so none of its settings
    labels_channels = False

    def __init__(self, config: RolesConfig):
        super().__init__(config)  # type: ignore[arg-type]
        self.others = tuple(dict.fromkeys(config.roles))
        self._evaluator: Evaluator | None = None
        self._timeout_s: float | None = None

    async def setup(self, builder: Builder) -> None:
        known, name = builder.config.eval.evaluators, self.config.evaluator
        if name not in known:
            message = f'eval.evaluators has no entry "{name}"{did_you_mean(name, known)}'
            fix = f"use one of: {', '.join(known)}" if known else "add an entry to eval.evaluators"
            raise ConfigError(Problem("evaluator", message, fix))
        self._evaluator = await builder.get_evaluator(name)
        self._timeout_s = builder.config.finetuning.limits.evaluator_timeout_s

    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns one round per role; each role speaks in its own channel."""
        return [[(role, role)] for role in self.config.roles]

    def channels(self) -> Mapping[str, Sequence[str]]:
        hears = self.config.hears
        return {
            role: [name for name in self.others if name == role or role in hears.get(name, self.others)]
            for role in self.others
        }

    def step_interaction_protocol(self, dialogue: Dialogue) -> Step:
        """Returns whether all rounds are over; `settle_rewards` scores the answer then."""
        return Step(done=dialogue.round >= self.max_message_rounds)

    def answer(self, dialogue: Dialogue) -> str:
        role = self.config.answer or self.config.roles[-1]
        return next(message.text for message in reversed(dialogue.messages) if message.agent == role)

    async def settle_rewards(self, dialogue: Dialogue, item: Any) -> Mapping[str, float]:
        """Returns each role's share of the answer's score."""
        if self._evaluator is None:
            raise EvaluationError(f"setup() was not called, so there is no evaluator {self.config.evaluator}")
        answered = item.copy_with_updates(output_obj=self.answer(dialogue))
        output = await score_item(self._evaluator, answered, self._timeout_s)
        if output.error is not None:
            raise EvaluationError(f"the evaluator {self.config.evaluator} returned no score: {output.error}")
        return {role: float(output.score) * self.config.role_rewards.get(role, 1.0) for role in self.others}

    @property
    def max_message_rounds(self) -> int:
        return len(self.config.roles) * self.config.passes

    @property
    def min_message_rounds(self) -> int:
        return self.max_message_rounds

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """Returns a role's share of a score of 0.5, the middle of scores from 0 to 1."""
        return 0.5 * self.config.role_rewards.get(agent_name, 1.0)
