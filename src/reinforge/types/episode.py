"""One run of the agent on one example, as the runner returns it and the journal stores it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ChatPrompt, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import Outcome


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Identifies one episode of a run."""

    phase: str  # why it ran: `collect`, `validate`, `confirm_base`, `confirm_tuned`, `transfer_base`, ..., `eval`
    epoch: int  # epoch of the episode; -1 for the baseline
    example_id: str
    generation: int = 0  # index among the episodes of the example, from 0
    round: int = 0  # refill round of the epoch; 0 for the first collection

    def __str__(self) -> str:
        return f"{self.phase}/{self.epoch}/{self.round}/{self.example_id}/{self.generation}"


@dataclass(slots=True)
class ModelCall:
    """One model call, exactly as it was made."""

    call_id: str  # the `id` of the chat completion that the agent received
    llm: str  # the entry under `llms` that was called
    model: str
    request: ModelRequest  # the request, with the sampling settings of the run applied
    reply: ModelReply  # the reply; with several choices, the one that the agent used
    functions: tuple[str, ...]  # enclosing function scopes, outermost first
    started_s: float  # seconds since the epoch
    ended_s: float
    others: tuple[ModelReply, ...] = ()  # the other choices of a request with `n` above 1; never trained on
    choice: int = 0  # the index of `reply` among all choices

    @property
    def choices(self) -> list[ModelReply]:
        """Every reply to this call, in the order in which the agent received them."""
        return [*self.others[: self.choice], self.reply, *self.others[self.choice :]]

    def choose(self, index: int) -> None:
        replies = self.choices
        self.reply, self.choice = replies.pop(index), index
        self.others = tuple(replies)

    @property
    def training_source(self) -> TokenLogprobs | ChatPrompt | None:
        """What training needs of the reply: its tokens, or its prompt if the policy reports none; None: untrainable."""
        reply = self.reply
        return reply.tokens if reply.tokens is not None or reply.policy_version is None else self.prompt

    @property
    def prompt(self) -> ChatPrompt:
        """The exact prompt; its version is -1 if the model is not the policy of this run."""
        reply, request = self.reply, self.request
        tools = tuple(request.tools) if request.tools else None
        version = -1 if reply.version is None else reply.version
        return ChatPrompt(tuple(request.messages), tools, version, reply.finish_reason)

    @property
    def num_completion_tokens(self) -> int:
        return sum(reply.num_completion_tokens for reply in self.choices)


@dataclass(slots=True)
class Mark:
    after_call: int  # number of model calls before it
    step_reward: float | None  # reward of the turn before it, or None
    data: Any
    functions: tuple[str, ...]  # enclosing function scopes, outermost first
    at_s: float  # seconds since the epoch
    call_id: str | None = None  # the call that it refers to; None: the one before it


@dataclass(slots=True)
class EpisodeRecord:
    """One finished episode."""

    key: EpisodeKey
    item: EvalInputItem  # the example, with the agent's output in `output_obj`
    outcome: Outcome = Outcome.OK  # how it ended
    reason: str | None = None  # why it failed; None if it did not
    seed: int = 0  # seed of the environment; the same for siblings unless the workflow says otherwise
    attempt: int = 0  # number of earlier attempts, in which the environment failed
    calls: list[ModelCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)  # every mark of the agent
    scores: dict[str, EvalOutputItem] = field(default_factory=dict)  # score by evaluator name
    reward: float | None = None  # score of the reward function, or the configured penalty; None if missing
    wall_s: float = 0.0
    overflow: str | None = None  # how a prompt exceeded the context, even if the agent continued; None: none did

    @property
    def num_prompt_tokens(self) -> int:
        return sum(call.reply.num_prompt_tokens for call in self.calls)

    @property
    def num_completion_tokens(self) -> int:
        """Number of sampled tokens of all calls, including choices that the agent did not use."""
        return sum(call.num_completion_tokens for call in self.calls)
