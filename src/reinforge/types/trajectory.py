"""Trajectories, groups and collections: what the collecting side hands to training."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from reinforge.errors import TrajectoryError
from reinforge.types.evaluation import MAX_SCORE
from reinforge.types.request import ChatPrompt, TokenLogprobs

OTHER_CHOICES = "num_tokens_of_other_choices"
"""Metadata key of the number of tokens in choices that the agent did not use."""


class Outcome(StrEnum):
    """How an episode ended: without error, by a failure of the policy, or by a failure of the environment.

    A failure of the policy gets its configured penalty, in training and in every metric. After a failure of the
    environment the episode is *missing*: retried, then dropped with a reason, never scored 0.0.
    """

    OK = "ok"
    POLICY_ERROR = "policy_error"
    OVERLONG = "overlong"
    CONTEXT_OVERFLOW = "context_overflow"
    POLICY_TIMEOUT = "policy_timeout"
    TOOL_ERROR = "tool_error"
    JUDGE_ERROR = "judge_error"
    REWARD_ERROR = "reward_error"
    BACKEND_ERROR = "backend_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def is_missing(self) -> bool:
        """True if the environment failed, so that the episode says nothing about the policy."""
        return self in _MISSING

    @property
    def is_policy_failure(self) -> bool:
        """True if the policy failed and gets the configured penalty."""
        return self is not Outcome.OK and self not in _MISSING


_MISSING = frozenset(
    {
        Outcome.TOOL_ERROR,
        Outcome.JUDGE_ERROR,
        Outcome.REWARD_ERROR,
        Outcome.BACKEND_ERROR,
        Outcome.TIMEOUT,
        Outcome.CANCELLED,
    }
)


class EpisodeItemRole(StrEnum):
    """Role of a message."""

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

    role: EpisodeItemRole = Field(description="Role of the message.")
    content: str = Field(description="The text; content blocks, tool calls and results are in `metadata`.")
    logprobs: Any | None = Field(default=None, description="Log-probs in any format, or None.")
    metadata: dict[str, Any] | None = Field(default=None, description="Further information about the message.")
    trained: bool | None = Field(
        default=None, description="Whether to train the turn; None: train it if its tokens or its prompt are recorded."
    )

    _source: TokenLogprobs | ChatPrompt | None = PrivateAttr(default=None)

    @classmethod
    def build(
        cls,
        role: EpisodeItemRole,
        content: str,
        *,
        logprobs: Any = None,
        metadata: dict[str, Any] | None = None,
        trained: bool | None = None,
    ) -> Self:
        """Returns an item from values of the right types; five times as fast as `model_construct`."""
        item, put = cls.__new__(cls), object.__setattr__
        values = {"role": role, "content": content, "logprobs": logprobs, "metadata": metadata, "trained": trained}
        put(item, "__dict__", values)
        put(item, "__pydantic_fields_set__", set(values))
        put(item, "__pydantic_extra__", None)
        put(item, "__pydantic_private__", {"_source": None})
        return item

    @property
    def tokens(self) -> TokenLogprobs | None:
        """The exact tokens of the turn, from `logprobs` or attached; None if not recorded, which makes it context."""
        tokens = self.logprobs if isinstance(self.logprobs, TokenLogprobs) else self._source
        return tokens if isinstance(tokens, TokenLogprobs) else None

    @property
    def prompt(self) -> ChatPrompt | None:
        """The exact prompt of a turn whose sampler does not report tokens, from `logprobs` or attached."""
        prompt = self.logprobs if isinstance(self.logprobs, ChatPrompt) else self._source
        return prompt if isinstance(prompt, ChatPrompt) else None

    @property
    def call_id(self) -> str | None:
        metadata = self.metadata or {}
        call_id = metadata.get("call_id", metadata.get("id"))
        return call_id if isinstance(call_id, str) else None

    def attach(self, source: TokenLogprobs | ChatPrompt) -> None:
        """Sets the exact tokens, or the exact prompt, of a turn that does not have them in `logprobs`."""
        self._source = source

    @property
    def is_recorded(self) -> bool:
        """True if the exact tokens are recorded, or the exact prompt if the sampler does not report tokens."""
        return self.tokens is not None or self.prompt is not None

    @property
    def is_trained(self) -> bool:
        return self.is_recorded if self.trained is None else self.trained and self.is_recorded


class OpenAIMessage(BaseModel):
    """A chat message of a preference example."""

    model_config = ConfigDict(extra="forbid")

    role: str = Field(description="Role of the message.")
    content: str = Field(description="The text.")


class DPOItem(BaseModel):
    """Two continuations of the same prompt, one preferred."""

    model_config = ConfigDict(extra="forbid")

    prompt: list[OpenAIMessage] | str = Field(description="The prompt of both continuations.")
    chosen_response: str = Field(description="The preferred continuation.")
    rejected_response: str = Field(description="The other continuation.")


class Trajectory(BaseModel):
    """What one policy did in one episode, with the reward."""

    model_config = ConfigDict(extra="forbid")

    episode: list[EpisodeItem] | list[DPOItem] = Field(description="The messages in order, or preference pairs.")
    reward: float = Field(description="Reward of the whole episode.")
    shaped_rewards: list[float] | None = Field(default=None, description="Reward of each assistant turn, in order.")
    metadata: dict[str, Any] | None = Field(default=None, description="Further information about the episode.")
    group_id: str | None = Field(default=None, description="The group of siblings that it belongs to.")
    episode_id: str | None = Field(default=None, description="Key of the episode in the journal of the run.")
    agent: str | None = Field(default=None, description="The agent whose view of the episode this is.")
    agent_weight: float = Field(
        default=1.0, ge=0, description="Weight of that agent in a job, independent of how many tokens it sampled."
    )
    model_group: str | None = Field(default=None, description="The shared-model group to train on it.")
    outcome: Outcome = Field(default=Outcome.OK, description="How the episode ended.")

    @property
    def turns(self) -> list[EpisodeItem]:
        return [
            item for item in self.episode if isinstance(item, EpisodeItem) and item.role is EpisodeItemRole.ASSISTANT
        ]

    @property
    def pairs(self) -> list[DPOItem]:
        return [item for item in self.episode if isinstance(item, DPOItem)]

    @property
    def is_trainable(self) -> bool:
        return any(turn.is_trained for turn in self.turns)


class TrajectoryGroup(BaseModel):
    """Siblings: trajectories of one agent on one example or tree node, for group-relative advantages."""

    model_config = ConfigDict(extra="forbid")

    group_id: str = Field(description="Id of the example or the tree node.")
    trajectories: list[Trajectory] = Field(description="The siblings.")

    @property
    def model_group(self) -> str | None:
        """The shared-model group to train on it; None: the only policy."""
        return self.trajectories[0].model_group

    @property
    def example_id(self) -> str:
        """The example that the siblings ran on, from the key of the first one's episode; without one `group_id`."""
        key = re.fullmatch(r"[a-z_]+/-?\d+/\d+/(.*)/\d+", self.trajectories[0].episode_id or "", re.DOTALL)
        return key[1] if key else self.group_id

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.trajectories)

    @property
    def reward_range(self) -> float:
        """Highest minus lowest reward; 0 means that all group-relative advantages are zero."""
        return max(self.rewards) - min(self.rewards)


class TrajectoryCollection(BaseModel):
    """The trajectories of one epoch, one inner list per example."""

    model_config = ConfigDict(extra="forbid")

    trajectories: list[list[Trajectory]] = Field(description="One inner list of siblings per example.")
    run_id: str = Field(description="The run that collected them.")
    epoch: int | None = Field(default=None, description="The epoch they were collected in.")
    model_group: str | None = Field(default=None, description="The shared-model group to train on them.")
    job_key: str | None = Field(default=None, description="Makes `submit` idempotent; None: a hash of the content.")

    _groups: list[TrajectoryGroup] | None = PrivateAttr(default=None)

    @property
    def groups(self) -> list[TrajectoryGroup]:
        """The validated groups: none is empty, each has one agent, one model and one group id, and rewards are usable.

        Raises:
            TrajectoryError: A group mixes agents, models or group ids, or a reward is not finite or beyond `MAX_SCORE`.
        """
        if self._groups is None:
            self._groups = [
                _build_group(index, siblings) for index, siblings in enumerate(self.trajectories) if siblings
            ]
        return self._groups

    @classmethod
    def from_groups(cls, groups: Iterable[TrajectoryGroup], run_id: str, epoch: int | None = None) -> Self:
        return cls(trajectories=[group.trajectories for group in groups], run_id=run_id, epoch=epoch)

    @property
    def num_trajectories(self) -> int:
        return sum(len(siblings) for siblings in self.trajectories)

    def resolve_job_key(self) -> str:
        """Returns `job_key`, or a SHA-256 of the content if it is None."""
        if self.job_key is not None:
            return self.job_key
        digest = hashlib.sha256(f"{self.run_id}/{self.epoch}/{self.model_group}".encode())
        for siblings in self.trajectories:
            for trajectory in siblings:
                digest.update(repr((trajectory.reward, trajectory.shaped_rewards, trajectory.episode)).encode())
            digest.update(b"|")
        return digest.hexdigest()


def _build_group(index: int, siblings: Sequence[Trajectory]) -> TrajectoryGroup:
    ids = {trajectory.group_id for trajectory in siblings} - {None}
    agents = {trajectory.agent for trajectory in siblings}
    model_groups = {trajectory.model_group for trajectory in siblings}
    if len(ids) > 1 or len(agents) > 1:
        raise TrajectoryError(
            f"trajectories[{index}] is not a group: its trajectories have the group ids {sorted(map(str, ids))} and "
            f"the agents {sorted(map(str, agents))}; a group needs one of each"
        )
    if len(model_groups) > 1:
        raise TrajectoryError(
            f"trajectories[{index}] is not a group: its trajectories train the models "
            f"{sorted(map(str, model_groups))}; a group needs one model"
        )
    for number, trajectory in enumerate(siblings):
        rewards = (trajectory.reward, *(trajectory.shaped_rewards or ()))
        invalid = [value for value in rewards if not math.isfinite(value) or abs(value) > MAX_SCORE]
        if invalid:
            raise TrajectoryError(
                f"trajectories[{index}][{number}] (episode {trajectory.episode_id}) has the reward {invalid[0]}; "
                f"rewards must be finite numbers, at most {MAX_SCORE:g}. If the reward is unknown, return None from "
                "compute_reward; the step_reward of a mark must be a number"
            )
    return TrajectoryGroup.model_construct(group_id=str(next(iter(ids), f"group-{index}")), trajectories=list(siblings))


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """The episodes of one epoch, before any of them is run."""

    example_ids: tuple[str, ...]  # the training examples, each once
    episodes_per_example: int  # siblings of each example
    groups_per_example: int = 1  # most groups that the episodes of one example make: one for each adapter
