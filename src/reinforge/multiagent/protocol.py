"""The base of every protocol: who speaks when and where, who sees what, who decides, when it ends, what each earns.

    class OneQuestionConfig(ProtocolConfig, name="one_question"):
        '''The verifier asks once, the prover answers, the verifier decides.'''


    @register_protocol(OneQuestionConfig)
    class OneQuestion(ProtocolHandler):
        provers = ("prover",)
        verifiers = ("verifier",)
        def turns(self):
            return [[("verifier", "main")], [("prover", "main")], [("verifier", "main")]]

A protocol is a workflow: `workflow: {_type: one_question, agents: {...}}`.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from reinforge.config.schema import WorkflowConfig
from reinforge.multiagent.agents import AgentParameters
from reinforge.multiagent.dialogue import DECISIONS, Decision, Dialogue, Problem, Step
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import BoundWorkflow

Turn = tuple[str, str]
"""Who speaks, and in which channel."""


class ProtocolConfig(WorkflowConfig):
    """What protocols share: the agents, and what decisions are worth."""

    agents: dict[str, AgentParameters] = Field(description="Parameters of each agent of the protocol, by its name.")
    num_responses: int = Field(
        default=1, ge=1, description="Replies of each round while training: more than 1 grows a tree (MALT)."
    )
    verifier_first: bool = Field(default=True, description="The verifier speaks before the provers.")
    randomize_prover_stance: bool = Field(
        default=False, description="Provers argue for accept or reject by chance; false: for accept."
    )
    prover_reward: float = Field(default=1.0, description="Earned by a prover whose stance is decided for.")
    verifier_reward: float = Field(default=1.0, description="Earned by the verifier for a right decision.")
    verifier_incorrect_penalty: float = Field(default=-1.0, description="Earned for a wrong decision.")
    verifier_terminated_penalty: float = Field(default=-1.0, description="Earned where the rounds end undecided.")
    verifier_no_guess_reward: float = Field(default=0.0, description="Earned for the decision `none`.")
    shared_reward: bool = Field(default=False, description="Every agent earns what the verifier earns.")
    max_message_rounds: int = Field(default=8, ge=1, description="Rounds, after which it is over undecided.")
    min_message_rounds: int = Field(default=1, ge=1, description="A decision in an earlier round is invalid.")
    last_round_hint: str = Field(
        default="Decide now: accept or reject.", description="Told to the verifier in its last round; empty: nothing."
    )


class ProtocolHandler(ABC):
    """One protocol; it keeps no state of an episode, which is all in the `Dialogue`.

    Args:
        config: Its settings.

    Attributes:
        provers: Names of the agents that argue.
        verifiers: Names of the agents that decide; the first one's decision counts.
        others: Names of further agents.
    """

    provers: ClassVar[tuple[str, ...]] = ()
    verifiers: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ProtocolConfig):
        self.config = config

    # What a protocol says.

    @abstractmethod
    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns who speaks in each round, then from the first again; nobody hears others of its own round."""

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns who sees each channel: here there is one, which all see."""
        return {"main": self.agent_names}

    def stances(self, problem: Problem, rng: random.Random) -> dict[str, Decision]:
        """Returns what each prover argues for in one episode."""
        if not self.config.randomize_prover_stance:
            return dict.fromkeys(self.prover_names, "accept")
        return {name: rng.choice(DECISIONS[:2]) for name in self.prover_names}

    def decision_of(self, text: str) -> Decision | None:
        """Returns what a verifier's message decides: the last of accept, reject, none as a word; None: a question."""
        found = re.findall(r"\b(accept|reject|none)\b", text.lower())
        return found[-1] if found else None

    def decision_text(self, decision: Decision) -> str:
        """Returns what a verifier says to decide: `decision_of` reads it back."""
        return decision

    def refuse(self, agent: str, text: str, dialogue: Dialogue) -> str | None:
        """Returns why a reply is invalid, so that another is drawn; None: it is valid."""
        if not text.strip():
            return "an empty message"
        if agent not in self.verifier_names:
            return None
        decision = self.decision_of(text)
        if decision is not None and dialogue.round + 1 < self.min_message_rounds:
            return f"a decision before round {self.min_message_rounds}"
        if decision is None and self.is_last_turn(agent, dialogue.round):
            return "no decision in the last round"
        return None

    def shown(self, agent: str, channel: str, text: str, dialogue: Dialogue) -> str:
        """Returns what the others are shown of a message: here evidence can be checked against the problem."""
        return text

    def hint(self, agent: str, dialogue: Dialogue) -> str:
        """Returns a last line for an agent that is about to speak; empty: none."""
        is_last = agent in self.verifier_names and self.is_last_turn(agent, dialogue.round)
        return self.config.last_round_hint if is_last else ""

    def step_interaction_protocol(self, dialogue: Dialogue) -> Step:
        """Returns what the round that was just said led to: over once the verifier decides, or the rounds are."""
        said = [m for m in dialogue.said_in(dialogue.round - 1) if m.agent in self.verifier_names[:1]]
        decision = next((d for m in said if (d := self.decision_of(m.text)) is not None), None)
        terminated = decision is None and dialogue.round >= self.max_message_rounds
        if decision is None and not terminated:
            return Step()
        return Step(True, decision, terminated, self.rewards(dialogue, decision))

    def rewards(self, dialogue: Dialogue, decision: Decision | None) -> dict[str, float]:
        """Returns what each agent earns for a decision; None: there was none when the rounds ended.

        Example: stance accept, truth reject, decision accept -> prover 1, verifier -1.
        """
        config = self.config
        if decision is None:
            earned = config.verifier_terminated_penalty
        elif decision == "none":
            earned = config.verifier_no_guess_reward
        else:
            right = decision == dialogue.problem.truth
            earned = config.verifier_reward if right else config.verifier_incorrect_penalty
        if config.shared_reward:
            return dict.fromkeys(self.agent_names, earned)
        won = {name: decision == dialogue.stances.get(name) for name in self.prover_names}
        provers = {name: config.prover_reward if won[name] else 0.0 for name in self.prover_names}
        return {**provers, **dict.fromkeys(self.verifier_names, earned)}

    async def settle(self, dialogue: Dialogue, item: Any) -> Mapping[str, float]:
        """Returns what each agent has earned once a dialogue is over; a team asks an evaluator here."""
        return dialogue.rewards

    # What follows from it; the reference's names.

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Every agent."""
        return (*self.prover_names, *self.verifier_names, *self.others)

    @property
    def prover_names(self) -> tuple[str, ...]:
        """The agents that argue."""
        return self.provers

    @property
    def verifier_names(self) -> tuple[str, ...]:
        """The agents that decide."""
        return self.verifiers

    @property
    def message_channel_names(self) -> tuple[str, ...]:
        """Every channel."""
        return tuple(self.channels())

    @property
    def agent_channel_visibility(self) -> list[tuple[str, str]]:
        """Pairs of an agent and a channel that it sees."""
        return [(agent, channel) for channel, members in self.channels().items() for agent in members]

    @property
    def max_message_rounds(self) -> int:
        """Rounds after which a dialogue is over."""
        return self.config.max_message_rounds

    @property
    def min_message_rounds(self) -> int:
        """Rounds before which nothing may be decided."""
        return self.config.min_message_rounds

    @property
    def max_verifier_questions(self) -> int:
        """Rounds in which the verifier may ask: all of its own but the last, in which it decides."""
        return max(0, sum(self._speaks(self.verifier_names, r) for r in range(self.max_message_rounds)) - 1)

    def can_agent_see_channel(self, agent_name: str, channel_name: str) -> bool:
        """Returns True if an agent hears what is said in a channel."""
        return agent_name in self.channels().get(channel_name, ())

    def can_agent_be_active(self, agent_name: str, round_id: int, channel_name: str) -> bool:
        """Returns True if an agent speaks in a channel in a round."""
        return (agent_name, channel_name) in self.speakers(round_id)

    def agent_first_active_round(self, agent_name: str) -> int:
        """Returns the first round that an agent speaks in.

        Raises:
            ValueError: It never does.
        """
        for round_ in range(self.max_message_rounds):
            if self._speaks((agent_name,), round_):
                return round_
        raise ValueError(f"{agent_name} never speaks in {self.max_message_rounds} rounds")

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """Returns the middle between the least and the most that an agent can earn."""
        config = self.config
        if agent_name in self.verifier_names or config.shared_reward:
            return (config.verifier_reward + config.verifier_incorrect_penalty) / 2
        return config.prover_reward / 2

    def speakers(self, round_id: int) -> list[Turn]:
        """Returns who speaks in a round, and where."""
        turns = self.turns()
        return list(turns[round_id % len(turns)])

    def is_last_turn(self, agent: str, round_id: int) -> bool:
        """Returns True if an agent does not speak again after a round."""
        return not any(self._speaks((agent,), r) for r in range(round_id + 1, self.max_message_rounds))

    def _speaks(self, agents: Sequence[str], round_id: int) -> bool:
        return any(agent in agents for agent, _ in self.speakers(round_id))


HandlerT = TypeVar("HandlerT", bound=type[ProtocolHandler])


def register_protocol(config_type: type[ProtocolConfig]) -> Callable[[HandlerT], HandlerT]:
    """Registers a protocol as a workflow under its configuration's name."""

    def decorate(handler: HandlerT) -> HandlerT:
        async def protocol(config: Any, builder: Any) -> AsyncIterator[BoundWorkflow]:
            from reinforge.multiagent.episode import protocol_workflow

            yield await protocol_workflow(handler(config), builder)

        protocol.__module__, protocol.__qualname__ = handler.__module__, handler.__qualname__
        protocol.handler = handler  # type: ignore[attr-defined]  # finds the handler of a `_type`
        register_workflow(config_type=config_type)(protocol)
        return handler

    return decorate
