"""Group relative policy optimisation (GRPO, arXiv:2402.03300, eq. 3 and section 4.1.2).

Credit of a trajectory is its reward relative to its siblings', the same for each of its tokens; the loss is PPO's
clipped surrogate, averaged over the tokens of a trajectory and then over trajectories.

Differs from the paper: `kl_coef` is 0 unless set (no reference model in memory). The options turn it into parts of
DAPO (arXiv:2503.14476: `clip_high` above `clip_low`, `aggregation: token`) and Dr. GRPO (arXiv:2503.20783:
`scale_advantages: false`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field

from reinforge.algorithms.advantages import relative_to
from reinforge.algorithms.samples import on_mask, samples_of_groups, weigh_by_trajectory
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm, Needs
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup


class GRPOConfig(AlgorithmConfig, name="grpo"):
    """Settings of GRPO; the defaults are the paper's, without the KL term."""

    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    scale_advantages: bool = Field(default=True, description="Divide by the group's standard deviation.")
    aggregation: Literal["sequence", "token"] = Field(
        default="sequence", description="Mean over each trajectory first, or over all tokens alike."
    )
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference (k3 estimator).")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy, which is raised.")


class GRPO(Algorithm):
    """Credit relative to siblings, clipped policy gradient."""

    needs_groups = True

    def __init__(self, config: GRPOConfig | None = None):
        self.config = config or GRPOConfig()
        self.needs = Needs(ref_logprobs=self.config.kl_coef > 0)
        names = ("clip_low", "clip_high", "kl_coef", "entropy_coef")
        self.loss = LossSpec("clipped_pg", {name: getattr(self.config, name) for name in names})

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of all groups; with `aggregation: sequence` each trajectory weighs the same."""
        samples = samples_of_groups(groups)
        if self.config.aggregation == "sequence":
            weigh_by_trajectory(samples)
        return samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns each sample's advantages `[T]`: its trajectory's credit on every trained token."""
        scale = self.config.scale_advantages
        return [on_mask(s, relative_to(s.reward, s.group_rewards, scale=scale)) for s in samples]


@register_algorithm(config_type=GRPOConfig)
async def grpo(config: GRPOConfig, builder: Any) -> AsyncIterator[GRPO]:
    """Yields GRPO."""
    yield GRPO(config)
