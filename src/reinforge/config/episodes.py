"""The configuration of a run's episodes: how replies are sampled, what failures cost, how long all may take."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reinforge.config.block import Block
from reinforge.types.evaluation import MAX_SCORE


class SamplingConfig(Block):
    """Sampling in training and validation; overrides what the agent asks for.

    The tokens that top_p, top_k and min_p keep are recorded, and training computes log-probs over the same tokens. A
    token is not trained if it was sampled at temperature 0, or if a filter kept more than 1024 tokens.
    """

    temperature: float = Field(default=1.0, ge=0, description="0: greedy decoding, which trains nothing.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the most likely tokens up to this total probability; 1: all."
    )
    top_k: int = Field(default=0, ge=0, description="Keep this many of the most likely tokens; 0: all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Keep tokens at least this fraction as likely as the most likely one; 0: all.",
    )


Penalty = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]


class OutcomesConfig(Block):
    """Rewards and retries of episodes that fail."""

    policy_error: Penalty = Field(
        default=0.0, description="Reward of an episode with an invalid action or an answer that cannot be parsed."
    )
    overlong: Penalty = Field(
        default=0.0, description="Reward of an episode that failed because a reply was cut off at max_tokens."
    )
    context_overflow: Penalty = Field(
        default=0.0, description="Reward of an episode whose prompt exceeded the context."
    )
    policy_timeout: Penalty = Field(
        default=0.0, description="Reward of an episode that ran out of time while the policy was replying."
    )
    retries: int = Field(default=2, ge=0, description="Retries after a failure of the environment.")
    max_missing: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a stage's episodes that may be missing; if more are missing, the run stops.",
    )


class LimitsConfig(Block):
    """Limits of a run."""

    renamed_keys: ClassVar[dict[str, str]] = {"max_refused_steps": "max_skipped_steps"}

    max_minutes: float | None = Field(
        default=None, gt=0, description="Stop after this many minutes; the run can be resumed."
    )
    max_tokens: int | None = Field(
        default=None, gt=0, description="Stop after this many sampled tokens; the run can be resumed."
    )
    episode_timeout_s: float = Field(default=120.0, gt=0, description="Time limit of an episode in seconds.")
    evaluator_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Time limit of an evaluator in seconds per answer; if it is exceeded, the score is missing.",
    )
    stage_timeout_s: float = Field(default=600.0, gt=0, description="Seconds without progress before a warning.")
    max_refills: int = Field(
        default=1, ge=0, description="Extra collections for an epoch with too few groups that have a training signal."
    )
    min_groups: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Minimum share of an epoch's groups with a training signal; with fewer, collect again.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="By how many versions the weights that sampled a token may be older than those that train on it. "
        "0: an epoch is sampled after the job of the one before. 1 or more: later epochs are sampled while a job "
        "trains, by a copy of the trained weights.",
    )
    max_empty_updates: int = Field(
        default=3, ge=1, description="Stop after this many epochs in a row without an optimizer step."
    )
    max_skipped_steps: int = Field(
        default=3,
        ge=1,
        description="Stop after skipping this many optimizer steps in a row because of non-finite numbers.",
    )


class TranscriptsConfig(Block):
    """Readable transcripts of multi-agent dialogues, in the run folder."""

    save: bool = Field(default=True, description="Write `transcripts/` during the run.")
    format: Literal["yaml", "json"] = Field(default="yaml", description="File format.")
    max_episodes: int = Field(
        default=32, ge=1, description="Maximum number of episodes per file, ordered by example and sample."
    )
