"""Dialogues: the messages of one episode of a protocol. Immutable, so the branches of a tree share their beginning.

round 0   verifier: Is cell 3 red?      round 1   prover: It is.      round 2   verifier: accept
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from reinforge.errors import EvaluationError
from reinforge.types.evaluation import EvalInputItem

Decision = Literal["accept", "reject", "none"]
DECISIONS: tuple[Decision, ...] = ("accept", "reject", "none")

_TRUTHS: dict[str, Decision] = dict.fromkeys(("accept", "1", "1.0", "true", "yes"), "accept")
_TRUTHS |= dict.fromkeys(("reject", "0", "0.0", "false", "no"), "reject")


@dataclass(frozen=True, slots=True)
class DialogueProblem:
    """The problem that a dialogue is about."""

    question: str
    truth: Decision | None = None
    """The right decision; None if the dataset does not give one or there is nothing to decide."""
    row: Mapping[str, Any] = field(default_factory=dict)  # the example's columns, for the role prompts

    @classmethod
    def without_truth(cls, item: EvalInputItem) -> DialogueProblem:
        return cls(str(item.input_obj), None, {"question": item.input_obj, **(item.full_dataset_entry or {})})

    @classmethod
    def from_item(cls, item: EvalInputItem, words: Mapping[str, Decision] | None = None) -> DialogueProblem:
        """Returns the problem of an example; its `expected_output_obj` is the right decision, or None."""
        problem, expected = cls.without_truth(item), item.expected_output_obj
        if expected is None:
            return problem
        truth = {**_TRUTHS, **(words or {})}.get(str(expected).strip().lower())
        if truth not in ("accept", "reject"):
            raise EvaluationError(f"the expected output of {item.id} is {expected!r}; write accept or reject")
        return replace(problem, truth=truth)


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    round: int  # its round, from 0
    agent: str
    channel: str  # its channel; the agents that see the channel read it from the next round on
    text: str  # what the agent wrote
    shown: str  # what the other agents see
    call_id: str = ""  # the model call that sampled it
    num_retries: int = 0  # invalid replies that were sampled before it
    refused: str | None = None  # why it is invalid: the agent's last attempt, which no agent sees; None: it is valid
    token_limit: bool = False  # the reply was cut at the maximum number of tokens


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one round."""

    done: bool = False
    decision: Decision | None = None  # the verifier's decision; None if it has not decided
    terminated: bool = False  # the dialogue reached its last round without a decision
    rewards: Mapping[str, float] = field(default_factory=dict)  # of this round, as far as they are known


@dataclass(frozen=True, slots=True)
class Dialogue:
    problem: DialogueProblem
    stances: Mapping[str, Decision] = field(default_factory=dict)  # the decision that each prover argues for
    messages: tuple[Message, ...] = ()  # by round, and by speaker within a round
    round: int = 0  # the next round, from 0
    step: Step = field(default_factory=Step)
    rewards: Mapping[str, float] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # agents that do not speak in this episode
    order: tuple[str, ...] = ()  # of the agents, for messages of one round; empty: the round's own order

    def messages_in(self, round_: int) -> list[Message]:
        messages = [message for message in self.messages if message.round == round_]
        return sorted(messages, key=lambda m: self.order.index(m.agent) if m.agent in self.order else -1)

    def before_round(self, round_: int) -> Dialogue:
        earlier = tuple(message for message in self.messages if message.round < round_)
        return replace(self, messages=earlier, round=round_, step=Step(), rewards={})

    def with_round(self, messages: tuple[Message, ...]) -> Dialogue:
        """Returns the dialogue with the messages of one more round, whose outcome is not known yet."""
        return replace(self, messages=(*self.messages, *messages), round=self.round + 1)

    def with_step(self, step: Step) -> Dialogue:
        earned = {name: self.rewards.get(name, 0.0) + value for name, value in step.rewards.items()}
        return replace(self, step=step, rewards={**self.rewards, **earned})


_MESSAGE_FIELDS = ("round", "agent", "channel", "text", "shown", "call_id", "num_retries", "token_limit")


def parse_dialogues(output: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[Dialogue]:
    """Returns the dialogues of an episode from its `ProtocolOutput`: one, or one per branch of its tree."""
    problem = DialogueProblem(output["question"], output["truth"], {"question": output["question"], **(row or {})})
    return [_parse_branch(output, problem, branch) for branch in output["branches"]]


def _parse_branch(output: Mapping[str, Any], problem: DialogueProblem, branch: Mapping[str, Any]) -> Dialogue:
    on_branch = [
        record
        for record in output["messages"]
        if branch["path"][: len(record["path"])] == record["path"] and not record.get("refused")
    ]
    messages = [Message(**{name: record[name] for name in _MESSAGE_FIELDS if name in record}) for record in on_branch]
    rewards = dict(branch["rewards"])
    return Dialogue(
        problem,
        dict(output["stances"]),
        tuple(sorted(messages, key=lambda message: message.round)),
        1 + max((message.round for message in messages), default=-1),
        Step(True, branch["decision"], branch["terminated"], rewards),
        rewards,
        frozenset(output.get("absent", ())),
        tuple(output.get("order", ())),
    )
