"""The block `finetuning.guards`: when a run warns that training goes wrong, and when it stops.

limit: 0.9, warn_after: 3, halt_after: 5     share without signal 0.95, 0.97, 0.98, 0.99, 0.99
                                             =>  warns after the third epoch, halts after the fifth
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from reinforge.config.block import Block


class GuardLimits(Block):
    """When one guard warns and halts; a measurement within the limit starts the count again."""

    limit: float | None = Field(default=None, description="The limit; null: off.")
    warn_after: int = Field(default=1, ge=1, description="Warn after this many measurements in a row beyond the limit.")
    halt_after: int | None = Field(
        default=None,
        ge=1,
        description="Stop the run, so that it can be resumed, after this many of them; null: only warn.",
    )

    measured_at: ClassVar[str] = "epochs"
    """What the counts are in."""


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
        default=0.01,
        gt=0,
        description="Largest KL(sampler, learner) of a job's tokens, in nats a token. null: off.",
    )
    warn_after: int = Field(default=2, ge=1, description="Warn after this many epochs in a row beyond the limit.")


class GuardsConfig(Block):
    """What is watched while a run trains; every guard warns, and stops the run if its `halt_after` is set."""

    train_select_gap: TrainSelectGapGuard = Field(default_factory=TrainSelectGapGuard)
    held_out_drop: HeldOutDropGuard = Field(default_factory=HeldOutDropGuard)
    length_growth: LengthGrowthGuard = Field(default_factory=LengthGrowthGuard)
    no_signal: NoSignalGuard = Field(default_factory=NoSignalGuard)
    entropy: EntropyGuard = Field(default_factory=EntropyGuard)
    mismatch: MismatchGuard = Field(default_factory=MismatchGuard)
