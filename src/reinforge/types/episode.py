"""One run of the agent on one example, as the runner leaves it and the journal keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ChatPrompt, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import Outcome


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Names one episode of a run; equal keys mean the same episode.

    Attributes:
        phase: Why it ran: `collect`, `validate`, `confirm_base`, `confirm_tuned`, `eval`.
        epoch: The epoch it belongs to; -1 for the baseline.
        example_id: The dataset's id of the example.
        generation: Which of the example's siblings or draws it is, from 0.
        round: Refill round of the epoch; 0 for the first collection.
    """

    phase: str
    epoch: int
    example_id: str
    generation: int = 0
    round: int = 0

    def __str__(self) -> str:
        return f"{self.phase}/{self.epoch}/{self.round}/{self.example_id}/{self.generation}"


@dataclass(slots=True)
class ModelCall:
    """One call of a model, exactly as it was made.

    Attributes:
        call_id: Names the call; the `id` of the chat completion that the agent got.
        llm: The entry under `llms` that was called.
        model: The model's own name.
        request: What was asked, the run's sampling already applied.
        reply: What came back; of several choices the one that the agent went on with.
        functions: Function scopes it was made in, outermost first.
        started_s, ended_s: Seconds since the epoch.
        others: The other choices, where several were asked for (`n`); sampled and never trained.
        choice: The index of `reply` among all choices.
    """

    call_id: str
    llm: str
    model: str
    request: ModelRequest
    reply: ModelReply
    functions: tuple[str, ...]
    started_s: float
    ended_s: float
    others: tuple[ModelReply, ...] = ()
    choice: int = 0

    @property
    def choices(self) -> list[ModelReply]:
        """Every reply to this call, in the order in which the agent got them."""
        return [*self.others[: self.choice], self.reply, *self.others[self.choice :]]

    def choose(self, index: int) -> None:
        """Says which choice the agent went on with."""
        replies = self.choices
        self.reply, self.choice = replies.pop(index), index
        self.others = tuple(replies)

    @property
    def known(self) -> TokenLogprobs | ChatPrompt | None:
        """What the reply can be trained by: its tokens, or its prompt where a policy tells none; None: by nothing."""
        reply, request = self.reply, self.request
        if reply.tokens is not None or reply.policy_version is None:
            return reply.tokens
        tools = tuple(request.tools) if request.tools else None
        return ChatPrompt(tuple(request.messages), tools, reply.policy_version, reply.finish_reason)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(reply.num_completion_tokens for reply in self.choices)


@dataclass(slots=True)
class Mark:
    """Something that the agent marked while it ran.

    Attributes:
        after_call: Number of model calls that were made before it.
        step_reward: Reward of the turn before it, or None.
        data: Whatever else was marked, for example a `TTCEventData`.
        functions: Function scopes it was made in, outermost first.
        at_s: Seconds since the epoch.
        call_id: The call that it is about; None: the one before it.
    """

    after_call: int
    step_reward: float | None
    data: Any
    functions: tuple[str, ...]
    at_s: float
    call_id: str | None = None


@dataclass(slots=True)
class EpisodeRecord:
    """One finished episode.

    Attributes:
        key: Which episode it is.
        item: The example, with the agent's output in `output_obj`.
        outcome: How it ended.
        reason: Why, where it did not end well.
        seed: Seed of the episode's world; equal for siblings unless the workflow says otherwise.
        attempt: How often the world had failed before this attempt.
        calls: Every model call, in the order they ended.
        marks: Everything the agent marked.
        scores: Score by evaluator name.
        reward: The reward function's score, or the stated penalty; None while it is missing.
        wall_s: Seconds it took.
    """

    key: EpisodeKey
    item: EvalInputItem
    outcome: Outcome = Outcome.OK
    reason: str | None = None
    seed: int = 0
    attempt: int = 0
    calls: list[ModelCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    scores: dict[str, EvalOutputItem] = field(default_factory=dict)
    reward: float | None = None
    wall_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all calls."""
        return sum(call.reply.num_prompt_tokens for call in self.calls)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens of all calls, of choices that the agent left too."""
        return sum(call.num_completion_tokens for call in self.calls)
