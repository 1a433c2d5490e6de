"""Base of every protocol: who speaks when and where, who sees what, who decides, when it ends, what each agent earns.

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
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from reinforge.config.schema import Block, WorkflowConfig
from reinforge.interfaces import Builder
from reinforge.multiagent.decisions import find_decision_words, list_decision_words, read_decision
from reinforge.multiagent.dialogue import DECISIONS, Decision, Dialogue, DialogueProblem, Step
from reinforge.types.evaluation import EvalInputItem

SupervisedRounds = Literal["none", "all", "first", "all_but_first"]


class AgentParameters(Block):
    """One agent of a protocol: its model, its role prompt and how its replies are sampled."""

    llm: str | None = Field(default=None, description="Entry of llms that the agent uses; null: the only entry.")
    prompt: str = Field(
        default="$question",
        description="Role prompt template: $question, $stance and dataset columns are filled in; $$ is a dollar sign.",
    )
    prompt_file: str | None = Field(
        default=None, description="File that holds the role prompt instead; relative to the configuration's folder."
    )
    freeze_agent: bool = Field(default=False, description="Its replies are never trained, even if its model is.")
    temperature: float | None = Field(default=None, ge=0, description="Ignored for a model that is trained.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Ignored for a model that is trained.")
    max_response_words: int = Field(
        default=150, ge=1, description="Filled in as $max_response_words in the role prompt."
    )
    max_tokens_per_message: int | None = Field(
        default=None, ge=1, description="Maximum tokens of a reply; null: as many as the context allows."
    )
    num_invalid_generation_retries: int = Field(default=20, ge=0, description="Retries after an invalid reply.")

    use_supervisor_message: SupervisedRounds = Field(
        default="none", description="Rounds in which its prompt ends with a supervisor's line that says what to write."
    )
    supervisor_name: str = Field(default="Supervisor", description="The name before that line.")

    def is_supervised(self, round_id: int) -> bool:
        rounds = self.use_supervisor_message
        return rounds == "all" or rounds == ("all_but_first" if round_id else "first")

    @model_validator(mode="after")
    def _check_single_prompt(self) -> AgentParameters:
        if self.prompt_file is not None and self.prompt != type(self).model_fields["prompt"].default:
            raise ValueError("prompt and prompt_file both set the role prompt; remove one of them")
        return self


Turn = tuple[str, str]  # an agent and the channel it speaks in


class DialogueConfig(WorkflowConfig):
    """What all protocols share: agents."""

    agents: dict[str, AgentParameters] = Field(description="The parameters of each agent, by name.")
    num_responses: int = Field(
        default=1,
        ge=1,
        description="Replies per turn of a trained agent during training; more than 1 grows a tree (MALT).",
    )


class ProtocolConfig(DialogueConfig):
    """What all protocols with a verifier share: their length, and the rewards of decisions."""

    verifier_first: bool = Field(default=True, description="The verifier speaks before the provers.")
    randomize_prover_stance: bool = Field(
        default=False, description="Provers argue for accept or reject at random; false: always for accept."
    )
    prover_reward: float = Field(default=1.0, description="Reward of a prover if the decision is its stance.")
    verifier_reward: float = Field(default=1.0, description="Reward of the verifier for a right decision.")
    verifier_incorrect_penalty: float = Field(default=-1.0, description="Reward for a wrong decision.")
    verifier_terminated_penalty: float = Field(default=-1.0, description="Reward if the rounds end without a decision.")
    verifier_no_guess_reward: float = Field(default=0.0, description="Reward for the decision `none`.")
    shared_reward: bool = Field(default=False, description="Every agent gets the verifier's reward.")
    max_message_rounds: int = Field(default=8, ge=1, description="Rounds after which an undecided dialogue ends.")
    min_message_rounds: int = Field(default=1, ge=1, description="A decision before this round is invalid.")
    last_round_hint: str | None = Field(
        default=None,
        description="Last line of the verifier's prompt in its last round; null: asks for a decision; empty: none.",
    )
    zero_knowledge: bool = Field(
        default=False,
        description="Add an adversarial verifier, and a simulator that must write what it writes without hearing it.",
    )
    simulator_reward_coefficient: float = Field(
        default=1.0, ge=0, description="zero_knowledge: factor of the simulator's reward."
    )
    aux_prover_reward_coefficient: float = Field(
        default=1.0, ge=0, description="zero_knowledge: what the provers get of the simulator's reward."
    )
    decision_words: dict[str, Decision] = Field(
        default={word: word for word in DECISIONS},
        description="Words that decide, in lower case, each with its decision: accept, reject or none.",
    )
    decision_values: dict[str, float] = Field(
        default_factory=dict,
        description="How far each word accepts, from -1 to 1: rewards are interpolated; empty: each decides fully.",
    )

    @model_validator(mode="after")
    def _can_be_decided(self) -> ProtocolConfig:
        if self.min_message_rounds > self.max_message_rounds:
            least, most = self.min_message_rounds, self.max_message_rounds
            rounds = f"min_message_rounds is {least} but max_message_rounds is {most}"
            raise ValueError(f"{rounds}; the verifier could never decide")
        if missing := {"accept", "reject"} - set(self.decision_words.values()):
            raise ValueError(f"decision_words has no word for {' and '.join(sorted(missing))}")
        if odd := [word for word in self.decision_words if word != word.strip().lower() or not word]:
            raise ValueError(f"decision_words: {odd[0]!r} must be a lower-case word")
        if self.decision_values and self.decision_values.keys() != self.decision_words.keys():
            raise ValueError("decision_values must have the words of decision_words, and no others")
        signs = {"accept": 1, "reject": -1, "none": 0}
        for word, value in self.decision_values.items():
            if abs(value) > 1 or signs[self.decision_words[word]] != (value > 0) - (value < 0):
                scale = "write 0 to 1 for accept, -1 to 0 for reject, 0 for none"
                raise ValueError(f"decision_values: {word!r} is {value}; {scale}")
        return self


class ProtocolHandler(ABC):
    """A protocol. It keeps no state of an episode; that is all in the `Dialogue`."""

    provers: tuple[str, ...] = ()  # names of the agents that argue
    verifiers: tuple[str, ...] = ()  # names of the agents that decide; the decision of the first one counts
    others: tuple[str, ...] = ()  # names of all other agents
    needs_truth: bool = False  # every example must have a right decision
    labels_channels: ClassVar[bool] = True  # messages carry their channel's name for agents that see several channels

    def __init__(self, config: ProtocolConfig):
        self.config = config

    async def setup(self, builder: Builder) -> None:  # noqa: B027  most protocols need nothing
        """Gets what the protocol needs from its run, such as a team's evaluator; a `ConfigError` if it is missing."""

    # What a protocol may define.

    @abstractmethod
    def turns(self) -> Sequence[Sequence[Turn]]:
        """Returns the turns of each round; rounds repeat in order. A message is seen from the next round on."""

    def channels(self) -> Mapping[str, Sequence[str]]:
        """Returns the agents that see each channel; by default a single channel that all agents see."""
        return {"main": self.agent_names}

    def parse_problem(self, item: EvalInputItem) -> DialogueProblem:
        """Returns an example's problem; an `EvaluationError` if its expected output is not a decision."""
        if not self.verifier_names:
            return DialogueProblem.without_truth(item)
        words = {} if self.config.decision_values else self.config.decision_words  # on a scale, 1 may mean reject
        return DialogueProblem.from_item(item, words)

    def stances(self, problem: DialogueProblem, rng: random.Random) -> dict[str, Decision]:
        if self.prover_names and self.config.randomize_prover_stance:
            return {name: rng.choice(DECISIONS[:2]) for name in self.prover_names}
        return dict.fromkeys(self.prover_names, "accept")

    def absent(self, problem: DialogueProblem, rng: random.Random) -> frozenset[str]:
        return frozenset()

    def order(self, problem: DialogueProblem, rng: random.Random) -> tuple[str, ...]:
        """Returns the order in which messages of the same round are delivered; empty: the order of the round."""
        return ()

    def parse_decision(self, text: str) -> Decision | None:
        """Returns the decision in a verifier's message (`decisions.py`); None if it is a question."""
        return read_decision(text, self.config.decision_words)

    def format_decision(self, decision: Decision) -> str:
        """Returns the message that makes a decision; `parse_decision` reads it back."""
        words = [word for word, meant in self.config.decision_words.items() if meant == decision]
        values = self.config.decision_values
        return max(words, key=lambda word: abs(values.get(word, 1.0)), default=decision)

    def check_reply(self, agent: str, text: str, dialogue: Dialogue) -> str | None:
        """Returns why a reply is invalid, in which case it is sampled again; None if it is valid."""
        if not text.strip():
            return "an empty message"
        if agent not in self.verifier_names:
            return None
        decision = self.parse_decision(text)
        if decision is not None and dialogue.round + 1 < self.min_message_rounds:
            return f"a decision before round {self.min_message_rounds}"
        if decision is None and self.is_last_turn(agent, dialogue.round):
            return "no decision in the last round"
        return None

    def visible_text(self, agent: str, channel: str, text: str, dialogue: Dialogue) -> str:
        """Returns what the other agents see of a message; override it to check evidence against the problem."""
        return text

    def display_name(self, agent: str, dialogue: Dialogue) -> str:
        return agent

    def hint(self, agent: str, dialogue: Dialogue) -> str:
        """Returns the last line of the prompt of an agent that is about to speak; empty: none."""
        if agent not in self.verifier_names or not self.is_last_turn(agent, dialogue.round):
            return ""
        if self.config.last_round_hint is not None:
            return self.config.last_round_hint
        return f"Decide now: {self.list_decisions()}."

    def list_decisions(self) -> str:
        if values := self.config.decision_values:
            return list_decision_words(values)
        return f"{self.format_decision('accept')} or {self.format_decision('reject')}"

    def task(self, agent: str, dialogue: Dialogue) -> str:
        """Returns what an agent should write next, for agents with a supervisor (`use_supervisor_message`)."""
        if agent not in self.verifier_names:
            return "Write your next message."
        if dialogue.round + 1 < self.min_message_rounds:
            return "Ask a question."
        way = "Decide" if self.is_last_turn(agent, dialogue.round) else "Ask a question, or decide"
        return f"{way}: write {self.list_decisions()} on a line of its own."

    def step_interaction_protocol(self, dialogue: Dialogue) -> Step:
        """Returns the outcome of the last round: the dialogue ends with a decision or with the last round.

        A verifier that decides both ways in one round, in two channels, has decided `none`.
        """
        texts = [m.text for m in dialogue.messages_in(dialogue.round - 1) if m.agent in self.verifier_names[:1]]
        decisions = {found for text in texts if (found := self.parse_decision(text)) is not None}
        decision: Decision | None = (decisions.pop() if len(decisions) == 1 else "none") if decisions else None
        terminated = decision is None and dialogue.round >= self.max_message_rounds
        if decision is None and not terminated:
            return Step()
        return Step(True, decision, terminated, self.rewards(dialogue, decision))

    def rewards(self, dialogue: Dialogue, decision: Decision | None) -> dict[str, float]:
        """Returns what each agent earns for a decision; None if the rounds ended without one.

        Absent agents are left out, and so are agents whose reward depends on a truth that is unknown.

        Example: stance accept, truth reject, decision accept -> prover 1, verifier -1; if the verifier's word has the
        value 0.5 in `decision_values`: prover 0.75, verifier -0.5.
        """
        config, truth = self.config, dialogue.problem.truth
        value = self.find_decision_value(dialogue, decision)
        present = [name for name in self.agent_names if name not in dialogue.absent]
        earned = {
            name: self._compute_prover_reward(dialogue.stances.get(name), decision, value)
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
            end = config.verifier_reward if decision == truth else config.verifier_incorrect_penalty
            share = 1.0 if value is None else abs(value)
            judged = share * end + (1 - share) * config.verifier_no_guess_reward
        paid = present if config.shared_reward else [name for name in present if name in self.verifier_names]
        return {**earned, **dict.fromkeys(paid, judged)}

    def find_decision_value(self, dialogue: Dialogue, decision: Decision | None) -> float | None:
        """Returns how far the verifier accepts, from -1 to 1; None without a decision or without `decision_values`."""
        values = self.config.decision_values
        if decision is None or not values:
            return None
        for message in reversed(dialogue.messages):
            if message.agent in self.verifier_names[:1] and self.parse_decision(message.text) == decision:
                words = find_decision_words(message.text, self.config.decision_words)
                return sum(values[word] for word in words) / len(words)
        return 0.0  # it decided both ways

    def _compute_prover_reward(self, stance: Decision | None, decision: Decision | None, value: float | None) -> float:
        if decision is None:
            share = 0.0
        elif value is None:
            share = float(decision == stance)
        else:
            share = (1 + (value if stance == "accept" else -value)) / 2
        return share * self.config.prover_reward

    async def settle_rewards(self, dialogue: Dialogue, item: Any) -> Mapping[str, float]:
        """Returns the final rewards of a dialogue that is over; a team calls its evaluator here."""
        return dialogue.rewards

    def answer(self, dialogue: Dialogue) -> str | None:
        """Returns a team's answer from a dialogue that is over; None for a protocol with a decision."""
        return None

    # What follows from it, under the names of neural-interactive-proofs.

    @property
    def agent_names(self) -> tuple[str, ...]:
        return (*self.prover_names, *self.verifier_names, *self.others)

    @property
    def prover_names(self) -> tuple[str, ...]:
        return self.provers

    @property
    def verifier_names(self) -> tuple[str, ...]:
        return self.verifiers

    @property
    def message_channel_names(self) -> tuple[str, ...]:
        return tuple(self.channels())

    @property
    def agent_channel_visibility(self) -> list[tuple[str, str]]:
        return [(agent, channel) for channel, members in self.channels().items() for agent in members]

    @property
    def max_message_rounds(self) -> int:
        return self.config.max_message_rounds

    @property
    def min_message_rounds(self) -> int:
        """The first round, counted from 1, in which a decision is valid."""
        return self.config.min_message_rounds

    @property
    def max_verifier_questions(self) -> int:
        """Number of the verifier's rounds but the last, in which it must decide."""
        return max(0, sum(self._speaks(self.verifier_names, r) for r in range(self.max_message_rounds)) - 1)

    def can_agent_see_channel(self, agent_name: str, channel_name: str) -> bool:
        return agent_name in self.channels().get(channel_name, ())

    def can_agent_be_active(self, agent_name: str, round_id: int, channel_name: str) -> bool:
        """Returns True if an agent speaks in a channel in a round (unless it is absent from the episode)."""
        return 0 <= round_id < self.max_message_rounds and (agent_name, channel_name) in self.turns_in_round(round_id)

    def agent_first_active_round(self, agent_name: str) -> int:
        """Returns the first round that an agent speaks in; a `ValueError` if there is none."""
        for round_ in range(self.max_message_rounds):
            if self._speaks((agent_name,), round_):
                return round_
        raise ValueError(f"{agent_name} never speaks in {self.max_message_rounds} rounds")

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """Returns the mean of an agent's rewards for the decision that it wants and for the opposite one."""
        config = self.config
        if agent_name in self.verifier_names or config.shared_reward:
            return (config.verifier_reward + config.verifier_incorrect_penalty) / 2
        return config.prover_reward / 2

    def turns_in_round(self, round_id: int) -> list[Turn]:
        turns = self.turns()
        return list(turns[round_id % len(turns)])

    def active_turns(self, dialogue: Dialogue) -> list[Turn]:
        return [turn for turn in self.turns_in_round(dialogue.round) if turn[0] not in dialogue.absent]

    def is_last_turn(self, agent: str, round_id: int) -> bool:
        return not any(self._speaks((agent,), r) for r in range(round_id + 1, self.max_message_rounds))

    def _speaks(self, agents: Sequence[str], round_id: int) -> bool:
        return any(agent in agents for agent, _ in self.turns_in_round(round_id))
