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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from reinforge.config.schema import WorkflowConfig
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.decisions import read_decision
from reinforge.multiagent.dialogue import DECISIONS, Decision, Dialogue, Problem, Step
from reinforge.types.evaluation import EvalInputItem

Turn = tuple[str, str]
"""Who speaks, and in which channel."""


class DialogueConfig(WorkflowConfig):
    """What every protocol has: agents who talk."""

    agents: dict[str, AgentParameters] = Field(description="Parameters of each agent of the protocol, by its name.")
    num_responses: int = Field(
        default=1,
        ge=1,
        description="Replies at each turn of a trained agent while training: more than 1 grows a tree (MALT).",
    )


class ProtocolConfig(DialogueConfig):
    """What protocols share in which somebody decides: how long they go on, and what decisions are worth."""

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
    last_round_hint: str | None = Field(
        default=None,
        description="Told to the verifier in its last round; null: to decide now, in its words; empty: nothing.",
    )
    decision_words: dict[str, Decision] = Field(
        default={word: word for word in DECISIONS},
        description="What a verifier writes to decide, in small letters, and what it means: accept, reject or none.",
    )

    @model_validator(mode="after")
    def _can_be_decided(self) -> ProtocolConfig:
        if self.min_message_rounds > self.max_message_rounds:
            raise ValueError(
                f"min_message_rounds is {self.min_message_rounds} and max_message_rounds {self.max_message_rounds}, "
                "so nothing could ever be decided"
            )
        if missing := {"accept", "reject"} - set(self.decision_words.values()):
            raise ValueError(f"decision_words has no word for {' and '.join(sorted(missing))}")
        if odd := [word for word in self.decision_words if word != word.strip().lower() or not word]:
            raise ValueError(f"decision_words: {odd[0]!r} is not a word in small letters")
        return self


class ProtocolHandler(ABC):
    """One protocol; it keeps no state of an episode, which is all in the `Dialogue`.

    Args:
        config: Its settings.

    Attributes:
        provers: Names of the agents that argue.
        verifiers: Names of the agents that decide; the first one's decision counts.
        others: Names of further agents.
        needs_truth: An example without a right decision is refused.
        tells_channels: An agent that sees several channels is told which one a message is in.
    """

    provers: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    needs_truth: ClassVar[bool] = False
    tells_channels: ClassVar[bool] = True

    def __init__(self, config: ProtocolConfig):
        self.config = config

    async def prepare(self, builder: Any) -> None:  # noqa: B027  most protocols need nothing
        """Gets what the protocol needs of its run before the first episode: a team its evaluator.

        Raises:
            ConfigError: It is not there.
        """

    # What a protocol says.

    @abstractmethod
    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns who speaks in each round, then from the first again; nobody hears others of its own round."""

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns who sees each channel: here there is one, which all see."""
        return {"main": self.agent_names}

    def problem(self, item: EvalInputItem) -> Problem:
        """Returns what an example is about.

        Raises:
            EvaluationError: Its expected output is no decision.
        """
        return Problem.of(item, self.config.decision_words) if self.verifier_names else Problem.undecided(item)

    def stances(self, problem: Problem, rng: random.Random) -> dict[str, Decision]:
        """Returns what each prover argues for in one episode."""
        if self.prover_names and self.config.randomize_prover_stance:
            return {name: rng.choice(DECISIONS[:2]) for name in self.prover_names}
        return dict.fromkeys(self.prover_names, "accept")

    def absent(self, problem: Problem, rng: random.Random) -> frozenset[str]:
        """Returns who does not speak in one episode: here everybody does."""
        return frozenset()

    def order(self, problem: Problem, rng: random.Random) -> tuple[str, ...]:
        """Returns agents in the order in which what they say at the same time is told; empty: that of the round."""
        return ()

    def decision_of(self, text: str) -> Decision | None:
        """Returns what a verifier's message decides (`decisions.py`); None: nothing, it is a question."""
        return read_decision(text, self.config.decision_words)

    def decision_text(self, decision: Decision) -> str:
        """Returns what a verifier says to decide: `decision_of` reads it back."""
        return next((word for word, meant in self.config.decision_words.items() if meant == decision), decision)

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

    def called(self, agent: str, dialogue: Dialogue) -> str:
        """Returns the name by which the others know an agent."""
        return agent

    def hint(self, agent: str, dialogue: Dialogue) -> str:
        """Returns a last line for an agent that is about to speak; empty: none."""
        if agent not in self.verifier_names or not self.is_last_turn(agent, dialogue.round):
            return ""
        if self.config.last_round_hint is not None:
            return self.config.last_round_hint
        return f"Decide now: {self.decision_text('accept')} or {self.decision_text('reject')}."

    def step_interaction_protocol(self, dialogue: Dialogue) -> Step:
        """Returns what the round that was just said led to: over once the verifier decides, or the rounds are.

        A verifier that decides both ways in one round, in two channels, has decided `none`.
        """
        said = [m.text for m in dialogue.said_in(dialogue.round - 1) if m.agent in self.verifier_names[:1]]
        decided = {read for text in said if (read := self.decision_of(text)) is not None}
        decision: Decision | None = (decided.pop() if len(decided) == 1 else "none") if decided else None
        terminated = decision is None and dialogue.round >= self.max_message_rounds
        if decision is None and not terminated:
            return Step()
        return Step(True, decision, terminated, self.rewards(dialogue, decision))

    def rewards(self, dialogue: Dialogue, decision: Decision | None) -> dict[str, float]:
        """Returns what each agent earns for a decision; None: there was none when the rounds ended.

        Left out are the absent, and where the truth is not known, those whose reward depends on it.

        Example: stance accept, truth reject, decision accept -> prover 1, verifier -1.
        """
        config, truth = self.config, dialogue.problem.truth
        present = [name for name in self.agent_names if name not in dialogue.absent]
        earned = {
            name: config.prover_reward if decision is not None and decision == dialogue.stances.get(name) else 0.0
            for name in present
            if name in self.prover_names
        }
        if decision is None:
            judged = config.verifier_terminated_penalty
        elif decision == "none":
            judged = config.verifier_no_guess_reward
        elif truth is None:
            return {} if config.shared_reward else earned
        else:
            judged = config.verifier_reward if decision == truth else config.verifier_incorrect_penalty
        paid = present if config.shared_reward else [name for name in present if name in self.verifier_names]
        return {**earned, **dict.fromkeys(paid, judged)}

    async def settle(self, dialogue: Dialogue, item: Any) -> Mapping[str, float]:
        """Returns what each agent has earned once a dialogue is over; a team asks an evaluator here."""
        return dialogue.rewards

    def answer(self, dialogue: Dialogue) -> str | None:
        """Returns what a finished dialogue answers, for a team; None: it was about a decision."""
        return None

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
        """Returns True if an agent speaks in a channel in a round, unless it is absent from the episode."""
        return 0 <= round_id < self.max_message_rounds and (agent_name, channel_name) in self.speakers(round_id)

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
        """Returns the middle between what an agent earns for the decision that it wants and for the other one."""
        config = self.config
        if agent_name in self.verifier_names or config.shared_reward:
            return (config.verifier_reward + config.verifier_incorrect_penalty) / 2
        return config.prover_reward / 2

    def speakers(self, round_id: int) -> list[Turn]:
        """Returns who speaks in a round, and where."""
        turns = self.turns()
        return list(turns[round_id % len(turns)])

    def active(self, dialogue: Dialogue) -> list[Turn]:
        """Returns who speaks next in a dialogue, and where."""
        return [turn for turn in self.speakers(dialogue.round) if turn[0] not in dialogue.absent]

    def is_last_turn(self, agent: str, round_id: int) -> bool:
        """Returns True if an agent does not speak again after a round."""
        return not any(self._speaks((agent,), r) for r in range(round_id + 1, self.max_message_rounds))

    def _speaks(self, agents: Sequence[str], round_id: int) -> bool:
        return any(agent in agents for agent, _ in self.speakers(round_id))
