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

_TRUTHS: dict[str, Decision] = dict.fromkeys(("accept", "1", "1.0", "true", "yes"), "accept")
_TRUTHS |= dict.fromkeys(("reject", "0", "0.0", "false", "no"), "reject")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is talked about.

    Attributes:
        question: The example's question.
        truth: The right decision; None where the dataset does not say, or there is nothing to decide.
        row: The example's columns, for role prompts.
    """

    question: str
    truth: Decision | None = None
    row: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def undecided(cls, item: EvalInputItem) -> Problem:
        """Returns an example as something to talk about and not to decide on."""
        return cls(str(item.input_obj), None, {"question": item.input_obj, **(item.full_dataset_entry or {})})

    @classmethod
    def of(cls, item: EvalInputItem, words: Mapping[str, Decision] | None = None) -> Problem:
        """Returns an example as a problem; `expected_output_obj` says what is right, or is None.

        Args:
            item: The example; it expects accept or reject, 1 or 0, true or false, yes or no.
            words: Further words for decisions.

        Raises:
            EvaluationError: The expected output is none of these.
        """
        problem, expected = cls.undecided(item), item.expected_output_obj
        if expected is None:
            return problem
        truth = {**_TRUTHS, **(words or {})}.get(str(expected).strip().lower())
        if truth not in ("accept", "reject"):
            raise EvaluationError(f"the expected output of {item.id} is {expected!r}; write accept or reject")
        return replace(problem, truth=truth)


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
        refused: Why it is invalid itself: its agent's last try, which nobody is shown; None: it is valid.
    """

    round: int
    agent: str
    channel: str
    text: str
    shown: str
    call_id: str = ""
    num_retries: int = 0
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What a round led to.

    Attributes:
        done: The dialogue is over.
        decision: What the verifier decided; None: it has not.
        terminated: It is over since its rounds are, without a decision.
        rewards: What each agent earned in this round; an agent is left out where nobody can tell.
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
        absent: Agents that do not speak in this episode.
        order: Agents in the order in which what they say at the same time is told; empty: that of the round.
    """

    problem: Problem
    stances: Mapping[str, Decision] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    round: int = 0
    step: Step = field(default_factory=Step)
    rewards: Mapping[str, float] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()

    def said_in(self, round_: int) -> list[Message]:
        """Returns the messages of one round, in the order in which they are told."""
        said = [message for message in self.messages if message.round == round_]
        return sorted(said, key=lambda m: self.order.index(m.agent) if m.agent in self.order else -1)

    def before(self, round_: int) -> Dialogue:
        """Returns the dialogue as it was when a round was about to be said."""
        said = tuple(message for message in self.messages if message.round < round_)
        return replace(self, messages=said, round=round_, step=Step(), rewards={})

    def after(self, messages: tuple[Message, ...]) -> Dialogue:
        """Returns the dialogue with one more round said, before anybody looks at what it led to."""
        return replace(self, messages=(*self.messages, *messages), round=self.round + 1)

    def ended(self, step: Step) -> Dialogue:
        """Returns the dialogue with what its last round led to."""
        earned = {name: self.rewards.get(name, 0.0) + value for name, value in step.rewards.items()}
        return replace(self, step=step, rewards={**self.rewards, **earned})
