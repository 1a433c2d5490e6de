"""What `_type: http` and a server of it say to each other: JSON with exact tokens, supports and versions.

    POST   /reinforge/v1/sessions                    OpenSession -> SessionDescription
    GET    /reinforge/v1/sessions/ID                 keeps it
    DELETE /reinforge/v1/sessions/ID
    POST   /reinforge/v1/sessions/ID/sample          SampleCall -> SampleAnswer
    POST   /reinforge/v1/sessions/ID/score           ScoreCall -> ScoreAnswer
    POST   /reinforge/v1/sessions/ID/encode          EncodeCall -> EncodeAnswer
    POST   /reinforge/v1/sessions/ID/jobs            SentJob -> StatusAnswer, the same job for the same key
    GET    /reinforge/v1/sessions/ID/jobs?job_key=K&wait_s=N
    POST   /reinforge/v1/sessions/ID/publish         PublishCall -> WeightsAnswer
    GET    /reinforge/v1/sessions/ID/fingerprint     -> WeightsAnswer
    PUT    /reinforge/v1/sessions/ID/saves/SAVE      SaveCall -> WeightsAnswer
    POST   /reinforge/v1/sessions/ID/restore         RestoreCall -> WeightsAnswer

Floats and tokens are the same on both sides, bit for bit; a log-prob that is not a number is sent as "NaN".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from reinforge.types.job import TrainingJobStatus
from reinforge.types.request import Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import (
    OTHER_CHOICES,
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    Outcome,
    Trajectory,
    TrajectoryCollection,
)

SESSIONS = "/reinforge/v1/sessions"
KEY_PATTERN = r"^[0-9a-f]{32}$"
Key = Annotated[str, Field(pattern=KEY_PATTERN)]
"""Names a session or its saved weights; never part of a path unless it matches."""
Version = Annotated[int, Field(ge=0, lt=1 << 62)]  # a version of the weights, which training keeps as a 64-bit integer
SENT_METADATA = (OTHER_CHOICES, "label")
"""What training reads of a trajectory's metadata; the rest stays where the run is."""
CLIENT_SETTINGS = (
    *("history", "activation_checkpointing", "max_model_len"),
    *("lora", "optimizer", "schedule", "batch", "critic"),
)
"""Settings of `finetuning.policy` that a client chooses; the model's files, data type and memory are the server's."""


class WireModel(BaseModel):
    model_config = ConfigDict(
        extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings"
    )


class OpenSession(WireModel):
    """Opens a session, once for each key."""

    key: Key  # made by the client; the same key finds the same session again
    model: str
    policy: dict[str, Any] = Field(default_factory=dict)
    """How it is trained: the settings of `finetuning.policy` that a client may choose."""
    algorithm: dict[str, Any]  # `_type` and settings
    seed: int = Field(default=0, ge=0)
    num_epochs: int = Field(default=1, ge=1)
    max_skipped_steps: int = Field(default=3, ge=1)  # `finetuning.limits.max_skipped_steps`


class SessionDescription(BaseModel):
    """What never changes about a session's policy; attributes are those of `PolicyServer`."""

    model_config = ConfigDict(extra="ignore")

    id: Key
    lease_s: float = Field(gt=0)  # seconds without a request after which the session may be ended
    model_name: str
    chat_template: str | None
    history: str
    tolerance: float
    max_model_len: int
    version: int


class SampleCall(WireModel):
    request: ModelRequest


class ScoreCall(WireModel):
    token_ids: list[list[int]]


class EncodeCall(WireModel):
    request: ModelRequest
    reply: Message


class PublishCall(WireModel):
    version: Version


class SaveCall(WireModel):
    """Keeps the current weights and optimizer state."""

    version: Version
    keep: list[str] | None = None
    """All saved weights that the run still refers to, as `SESSION/SAVE`; others of this session and of those that it
    continues are removed. None: remove nothing."""


class RestoreCall(WireModel):
    session: Key
    save: Key
    version: Version


class SessionAnswer(BaseModel):
    """Base of the answers."""

    model_config = ConfigDict(
        extra="ignore", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings"
    )

    raised: dict[str, Any] | None = None  # what the call raised at the server, as plain data; None: nothing


class SampleAnswer(SessionAnswer):
    reply: ModelReply | None = None


class ScoreAnswer(SessionAnswer):
    logprobs: list[list[float]] = Field(default_factory=list)


class EncodeAnswer(SessionAnswer):
    tokens: TokenLogprobs | None = None


class StatusAnswer(SessionAnswer):
    """The status of a job; `raised` is set if it failed because the server lacked memory or storage."""

    status: TrainingJobStatus | None = None


class WeightsAnswer(SessionAnswer):
    version: int = 0
    fingerprint: str = ""


class SentTurn(WireModel):
    """One message; only its tokens are trained."""

    role: EpisodeItemRole
    content: str = ""
    trained: bool | None = None
    tokens: TokenLogprobs | None = None


class SentTrajectory(WireModel):
    """One trajectory without what only its run knows."""

    turns: list[SentTurn] = Field(default_factory=list)
    pairs: list[DPOItem] = Field(default_factory=list)
    reward: float = Field(allow_inf_nan=False)
    shaped_rewards: list[float] | None = None
    metadata: dict[str, Any] | None = None
    group_id: str | None = None
    episode_id: str | None = None
    agent: str | None = None
    agent_weight: float = Field(default=1.0, ge=0)
    model_group: str | None = None
    outcome: Outcome = Outcome.OK


class SentJob(WireModel):
    job_key: str = Field(min_length=1, max_length=500)
    run_id: str
    epoch: int | None = None
    groups: list[list[SentTrajectory]]


_SAME = ("reward", "shaped_rewards", "group_id", "episode_id", "agent", "agent_weight", "model_group", "outcome")
"""Fields that are the same in `Trajectory` and `SentTrajectory`."""


def write_job(collection: TrajectoryCollection) -> SentJob:
    """Returns a collection as it is sent.

    Example: a message of a tool is sent without metadata; a sampled reply with its tokens, log-probs and supports.
    """
    groups = [[_write_trajectory(each) for each in siblings] for siblings in collection.trajectories]
    return SentJob(
        job_key=collection.resolve_job_key(), run_id=collection.run_id, epoch=collection.epoch, groups=groups
    )


def _write_trajectory(trajectory: Trajectory) -> SentTrajectory:
    turns = [
        SentTurn(role=item.role, content=item.content, trained=item.trained, tokens=_strip(item.tokens))
        for item in trajectory.episode
        if isinstance(item, EpisodeItem)
    ]
    known = trajectory.metadata or {}
    metadata = {name: known[name] for name in SENT_METADATA if name in known}
    same = {name: getattr(trajectory, name) for name in _SAME}
    return SentTrajectory(turns=turns, pairs=trajectory.pairs, metadata=metadata or None, **same)


def _strip(tokens: TokenLogprobs | None) -> TokenLogprobs | None:
    """Returns tokens in plain types, without what is for the agent alone."""
    if tokens is None:
        return None
    return replace(tokens, prompt_token_ids=tuple(tokens.prompt_token_ids), texts=(), top_logprobs=())


def read_job(sent: SentJob) -> TrajectoryCollection:
    return TrajectoryCollection(
        trajectories=[[_read_trajectory(each) for each in siblings] for siblings in sent.groups],
        run_id=sent.run_id,
        epoch=sent.epoch,
        job_key=sent.job_key,
    )


def _read_trajectory(sent: SentTrajectory) -> Trajectory:
    turns = [
        EpisodeItem(role=each.role, content=each.content, trained=each.trained, logprobs=each.tokens)
        for each in sent.turns
    ]
    same = {name: getattr(sent, name) for name in _SAME}
    return Trajectory(episode=turns or sent.pairs, metadata=sent.metadata, **same)
