"""Trajectories, their groups and collections: the only currency between collecting and training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from reinforge.errors import TrajectoryError
from reinforge.types.request import ChatPrompt, TokenLogprobs

OTHER_CHOICES = "num_tokens_of_other_choices"
"""Where a trajectory's metadata counts the tokens of choices that the agent did not go on with."""


class Outcome(StrEnum):
    """How an episode ended: well, by the policy's own failure, or by the world's.

    The policy's own failures are failures with their stated penalty, in training and in every figure. The world's
    failures are *missing*: retried, then dropped with a reason, never 0.0.
    """

    OK = "ok"
    POLICY_ERROR = "policy_error"
    OVERLONG = "overlong"
    CONTEXT_OVERFLOW = "context_overflow"
    POLICY_TIMEOUT = "policy_timeout"
    TOOL_ERROR = "tool_error"
    JUDGE_ERROR = "judge_error"
    BACKEND_ERROR = "backend_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_missing(self) -> bool:
        """True where the world failed, so that nothing is known about the policy."""
        return self in _MISSING

    @property
    def is_policy_failure(self) -> bool:
        """True where the policy itself failed and is scored with the stated penalty."""
        return self is not Outcome.OK and self not in _MISSING


_MISSING = frozenset(
    {Outcome.TOOL_ERROR, Outcome.JUDGE_ERROR, Outcome.BACKEND_ERROR, Outcome.TIMEOUT, Outcome.CANCELLED}
)


class EpisodeItemRole(StrEnum):
    """Who spoke."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


class EpisodeItem(BaseModel):
    """One message of an episode."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    role: EpisodeItemRole = Field(description="Who spoke.")
    content: str = Field(description="The text; blocks, tool calls and results stay whole in `metadata`.")
    logprobs: Any | None = Field(default=None, description="Log-probs as they were given, or None.")
    metadata: dict[str, Any] | None = Field(default=None, description="What else is known of the message.")
    trained: bool | None = Field(
        default=None, description="Whether the turn is trained; None: trained if its tokens or its prompt are known."
    )

    @property
    def tokens(self) -> TokenLogprobs | None:
        """The exact tokens of the turn, given or bound, or None where they are not known and it is context."""
        found = self.logprobs if isinstance(self.logprobs, TokenLogprobs) else (self.metadata or {}).get("tokens")
        return found if isinstance(found, TokenLogprobs) else None

    @property
    def prompt(self) -> ChatPrompt | None:
        """What exactly the turn answered, given or bound, where its sampler tells no tokens."""
        found = self.logprobs if isinstance(self.logprobs, ChatPrompt) else (self.metadata or {}).get("prompt")
        return found if isinstance(found, ChatPrompt) else None

    @property
    def call_id(self) -> str | None:
        """The id of the chat completion that the turn is, where `metadata` names it as `call_id` or `id`."""
        named = self.metadata or {}
        found = named.get("call_id", named.get("id"))
        return found if isinstance(found, str) else None

    def bind_tokens(self, tokens: TokenLogprobs) -> None:
        """Sets the exact tokens of a turn whose `logprobs` do not hold them."""
        self.metadata = {**(self.metadata or {}), "tokens": tokens}

    def bind_prompt(self, prompt: ChatPrompt) -> None:
        """Sets what exactly a turn answered whose `logprobs` do not hold it."""
        self.metadata = {**(self.metadata or {}), "prompt": prompt}

    @property
    def is_known(self) -> bool:
        """True if it is known exactly what was sampled, by tokens or, from a sampler that tells none, by messages."""
        return self.tokens is not None or self.prompt is not None

    @property
    def is_trained(self) -> bool:
        """True if the turn carries loss."""
        return self.is_known if self.trained is None else self.trained and self.is_known


class OpenAIMessage(BaseModel):
    """A chat message of a preference example."""

    model_config = ConfigDict(extra="forbid")

    role: str = Field(description="Who spoke.")
    content: str = Field(description="The text.")


class DPOItem(BaseModel):
    """Two continuations of the same prompt, one preferred."""

    model_config = ConfigDict(extra="forbid")

    prompt: list[OpenAIMessage] | str = Field(description="What both continuations answer.")
    chosen_response: str = Field(description="The preferred continuation.")
    rejected_response: str = Field(description="The other one.")


class Trajectory(BaseModel):
    """What one policy did in one episode, with its reward."""

    model_config = ConfigDict(extra="forbid")

    episode: list[EpisodeItem] | list[DPOItem] = Field(description="The messages in order, or preference pairs.")
    reward: float = Field(description="Reward of the whole episode.")
    shaped_rewards: list[float] | None = Field(default=None, description="Reward of each assistant turn, in order.")
    metadata: dict[str, Any] | None = Field(default=None, description="What else is known of the episode.")
    group_id: str | None = Field(default=None, description="Group whose rewards may be compared.")
    episode_id: str | None = Field(default=None, description="Names the episode in the run's journal.")
    agent: str | None = Field(default=None, description="The agent whose view this is.")
    agent_weight: float = Field(
        default=1.0, ge=0, description="What that agent counts in a job beside others, however much it says."
    )
    model_group: str | None = Field(default=None, description="The shared-model group that is trained on it.")
    outcome: Outcome = Field(default=Outcome.OK, description="How the episode ended.")

    @property
    def turns(self) -> list[EpisodeItem]:
        """The assistant turns, in order."""
        return [
            item for item in self.episode if isinstance(item, EpisodeItem) and item.role is EpisodeItemRole.ASSISTANT
        ]

    @property
    def pairs(self) -> list[DPOItem]:
        """The preference pairs that stand in place of an episode."""
        return [item for item in self.episode if isinstance(item, DPOItem)]

    @property
    def is_trainable(self) -> bool:
        """True if at least one turn carries loss."""
        return any(turn.is_trained for turn in self.turns)


class TrajectoryGroup(BaseModel):
    """Siblings: trajectories of one example (or one tree node) and one agent, whose rewards may be compared."""

    model_config = ConfigDict(extra="forbid")

    group_id: str = Field(description="The example id, or the node's.")
    trajectories: list[Trajectory] = Field(description="The siblings.")

    @property
    def model_group(self) -> str | None:
        """Who is trained on it; None: the one policy."""
        return self.trajectories[0].model_group

    @property
    def rewards(self) -> list[float]:
        """Reward of each sibling."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def mean_reward(self) -> float:
        """Mean reward of the siblings."""
        return sum(self.rewards) / len(self.trajectories)

    @property
    def reward_range(self) -> float:
        """Highest reward minus lowest: 0 means that group-relative credit is zero."""
        return max(self.rewards) - min(self.rewards)


class TrajectoryCollection(BaseModel):
    """The trajectories of one epoch, one inner list per example."""

    model_config = ConfigDict(extra="forbid")

    trajectories: list[list[Trajectory]] = Field(description="One inner list of siblings per example.")
    run_id: str = Field(description="The run that collected them.")
    epoch: int | None = Field(default=None, description="The epoch they were collected in.")
    model_group: str | None = Field(default=None, description="The shared-model group that is trained on them.")
    job_key: str | None = Field(default=None, description="Makes `submit` idempotent; default: a hash of the content.")

    _groups: list[TrajectoryGroup] | None = PrivateAttr(default=None)

    @property
    def groups(self) -> list[TrajectoryGroup]:
        """The checked view: no empty group; one agent, one model and one group id a group; rewards that are numbers.

        Raises:
            TrajectoryError: A group mixes agents, models or group ids, or a reward is not finite.
        """
        if self._groups is None:
            self._groups = [_group(index, siblings) for index, siblings in enumerate(self.trajectories) if siblings]
        return self._groups

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories over all groups."""
        return sum(len(siblings) for siblings in self.trajectories)

    def resolved_job_key(self) -> str:
        """Returns `job_key`, or a SHA-256 of the content where none was given."""
        if self.job_key is not None:
            return self.job_key
        digest = hashlib.sha256(f"{self.run_id}/{self.epoch}/{self.model_group}".encode())
        for siblings in self.trajectories:
            for trajectory in siblings:
                digest.update(repr((trajectory.reward, trajectory.shaped_rewards, trajectory.episode)).encode())
            digest.update(b"|")
        return digest.hexdigest()


def _group(index: int, siblings: Sequence[Trajectory]) -> TrajectoryGroup:
    ids = {trajectory.group_id for trajectory in siblings} - {None}
    agents = {trajectory.agent for trajectory in siblings}
    model_groups = {trajectory.model_group for trajectory in siblings}
    if len(ids) > 1 or len(agents) > 1:
        raise TrajectoryError(
            f"trajectories[{index}] is no group: its members have group ids {sorted(map(str, ids))} and agents "
            f"{sorted(map(str, agents))}; rewards of different examples or agents cannot be compared"
        )
    if len(model_groups) > 1:
        raise TrajectoryError(
            f"trajectories[{index}] is no group: its members train {sorted(map(str, model_groups))}, and what one "
            "model did cannot be compared with what another did"
        )
    for number, trajectory in enumerate(siblings):
        found = [value for value in (trajectory.reward, *(trajectory.shaped_rewards or ())) if not math.isfinite(value)]
        if found:
            raise TrajectoryError(
                f"trajectories[{index}][{number}], the episode {trajectory.episode_id}, has the reward {found[0]}: "
                "where a reward is not known the builder leaves the trajectory out (compute_reward returns None), and "
                "the step_reward of a mark is a number"
            )
    return TrajectoryGroup.model_construct(group_id=str(next(iter(ids), f"group-{index}")), trajectories=list(siblings))
