"""Blocks of `finetuning` that belong to the run: sampling, outcomes, limits, guards."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from reinforge.types.evaluation import MAX_SCORE
from reinforge.types.key_aliases import ConfigModel


class Block(ConfigModel):
    """Base of the blocks; rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)


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

InFlight = Literal["wait", "keep", "recompute", "abort"]  # what new weights do to replies that are being sampled


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
    refused_calls: Literal["fail", "ignore"] = Field(
        default="fail",
        description="An episode of which a model call was refused (status 400) is missing, or counts as any other.",
    )
    unsupported_content: Literal["refuse", "omit"] = Field(
        default="refuse",
        description="Calls with images, sound or files are refused, or a note such as [image omitted] replaces these.",
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
    in_flight: InFlight = Field(
        default="wait",
        description="With max_staleness, what happens to replies that are being sampled when weights are published: "
        "the weights wait for them (`wait`), they continue with the new weights (`keep`; each token records its "
        "version), they continue once their keys and values are recomputed (`recompute`), or they are sampled again "
        "(`abort`).",
    )
    max_empty_updates: int = Field(
        default=3, ge=1, description="Stop after this many epochs in a row without an optimizer step."
    )
    allow_no_training: bool = Field(
        default=False, description="End a run in which nothing was trained as completed; false: it fails."
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


class GuardLimits(Block):
    """When one guard warns and halts; a measurement within the limit starts the count again."""

    limit: float | None = Field(default=None, description="The limit; null: off.")
    warn_after: int = Field(default=1, ge=1, description="Warn after this many measurements in a row beyond the limit.")
    halt_after: int | None = Field(
        default=None,
        ge=1,
        description="Stop the run, so that it can be resumed, after this many of them; null: only warn.",
    )

    measured_at: ClassVar[str] = "epochs"  # what the counts are in


class TrainSelectGapGuard(GuardLimits):
    """The training reward rises much more than the reward on the select examples."""

    limit: float | None = Field(
        default=0.2,
        ge=0,
        description="Largest difference between the rise of the training reward and that of the select reward, in "
        "units of the reward; their 95 % intervals must be apart too. null: off. Measured at each validation.",
    )
    measured_at: ClassVar[str] = "validations"


class HeldOutDropGuard(GuardLimits):
    """A metric that is not the reward gets worse on the select examples."""

    limit: float | None = Field(
        default=0.1,
        ge=0,
        description="Largest drop of finetuning.gate.metric, if it is not the reward, and of each of "
        "finetuning.gate.guard_metrics on the select examples, in units of the metric. null: off. Measured at each "
        "validation.",
    )
    measured_at: ClassVar[str] = "validations"


class LengthGrowthGuard(GuardLimits):
    """Episodes get much longer than they were at the start."""

    limit: float | None = Field(
        default=3.0,
        gt=1,
        description="Largest mean number of sampled tokens of an episode, as a multiple of that of the first epoch. "
        "null: off.",
    )
    warn_after: int = Field(default=2, ge=1, description="Warn after this many epochs in a row beyond the limit.")


class NoSignalGuard(GuardLimits):
    """Nearly all groups have equal rewards, so there is nothing to learn from them."""

    limit: float | None = Field(
        default=0.9, ge=0, lt=1, description="Largest share of the groups without a training signal. null: off."
    )
    warn_after: int = Field(default=3, ge=1, description="Warn after this many epochs in a row beyond the limit.")


class EntropyGuard(GuardLimits):
    """The model always samples the same replies."""

    limit: float | None = Field(
        default=0.01,
        ge=0,
        description="Smallest mean entropy of the trained tokens, in nats. null: off. Measured where episodes have "
        "rewards.",
    )
    warn_after: int = Field(default=2, ge=1, description="Warn after this many epochs in a row below the limit.")


class MismatchGuard(GuardLimits):
    """The learner's log-probs are not those that the sampler reported."""

    limit: float | None = Field(
        default=0.01, gt=0, description="Largest KL(sampler, learner) of a job's tokens, in nats a token. null: off."
    )
    warn_after: int = Field(default=2, ge=1, description="Warn after this many epochs in a row beyond the limit.")


class CollapseGuard(GuardLimits):
    """Training has destroyed what the model could do."""

    limit: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Largest share of the mean reward before training that may be lost, at the near ends of both 95 % "
        "intervals: on the select examples at each validation, on the training examples in other epochs. null: off. "
        "Not measured where that reward is not above 0.",
    )
    halt_after: int | None = Field(
        default=2,
        ge=1,
        description="Stop the run, so that it can be resumed, after this many of them; null: only warn.",
    )


class GuardsConfig(Block):
    """What is watched while a run trains; every guard warns, and stops the run if its `halt_after` is set."""

    collapse: CollapseGuard = Field(default_factory=CollapseGuard)
    train_select_gap: TrainSelectGapGuard = Field(default_factory=TrainSelectGapGuard)
    held_out_drop: HeldOutDropGuard = Field(default_factory=HeldOutDropGuard)
    length_growth: LengthGrowthGuard = Field(default_factory=LengthGrowthGuard)
    no_signal: NoSignalGuard = Field(default_factory=NoSignalGuard)
    entropy: EntropyGuard = Field(default_factory=EntropyGuard)
    mismatch: MismatchGuard = Field(default_factory=MismatchGuard)
