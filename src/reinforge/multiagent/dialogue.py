"""What has been said in one episode of a protocol. None changes, so branches of a tree share a beginning.

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

_TRUTHS: dict[Any, Decision] = {"accept": "accept", "1": "accept", "true": "accept", "yes": "accept"}
_TRUTHS |= {"reject": "reject", "0": "reject", "false": "reject", "no": "reject"}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is talked about.

    Attributes:
        question: The example's question.
        truth: The right decision; None where the dataset does not say.
        row: The example's columns, for role prompts.
    """

    question: str
    truth: Decision | None = None
    row: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, item: EvalInputItem) -> Problem:
        """Returns an example as a problem; `expected_output_obj` is accept or reject, 1 or 0, true or false, or None.

        Raises:
            EvaluationError: The expected output is none of these.
        """
        expected = item.expected_output_obj
        row = {"question": item.input_obj, **(item.full_dataset_entry or {})}
        if expected is None:
            return cls(str(item.input_obj), None, row)
        truth = _TRUTHS.get(str(int(expected) if isinstance(expected, bool | float) else expected).strip().lower())
        if truth is None:
            raise EvaluationError(f"the expected output of {item.id} is {expected!r}; write accept or reject")
        return cls(str(item.input_obj), truth, row)


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        round: The round it was said in, from 0.
        agent: Who said it.
        channel: Where; the agents that see the channel hear it from the next round on.
        text: What was said.
        shown: What the others are shown.
        call_id: The model call that drew it.
        num_retries: Invalid replies that were drawn before it.
    """

    round: int
    agent: str
    channel: str
    text: str
    shown: str
    call_id: str = ""
    num_retries: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a round led to.

    Attributes:
        done: The dialogue is over.
        decision: What the verifier decided; None: it has not.
        terminated: It is over since its rounds are, without a decision.
        rewards: What each agent earned in this round.
    """

    done: bool = False
    decision: Decision | None = None
    terminated: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A dialogue so far.

    Attributes:
        problem: What it is about.
        stances: What each prover argues for.
        messages: In the order of rounds, and of speakers within a round.
        round: The round that is next, from 0.
        step: What the last round led to.
        rewards: What each agent has earned so far.
    """

    problem: Problem
    stances: Mapping[str, Decision] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    round: int = 0
    step: Step = field(default_factory=Step)
    rewards: Mapping[str, float] = field(default_factory=dict)

    def said_in(self, round_: int) -> list[Message]:
        """Returns the messages of one round."""
        return [message for message in self.messages if message.round == round_]

    def after(self, messages: tuple[Message, ...]) -> Dialogue:
        """Returns the dialogue with one more round said, before anybody looks at what it led to."""
        return replace(self, messages=(*self.messages, *messages), round=self.round + 1)

    def ended(self, step: Step) -> Dialogue:
        """Returns the dialogue with what its last round led to."""
        earned = {name: self.rewards.get(name, 0.0) + value for name, value in step.rewards.items()}
        return replace(self, step=step, rewards={**self.rewards, **earned})
