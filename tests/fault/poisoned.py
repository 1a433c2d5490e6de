"""GRPO with non-finite credit for some samples of one job, and a builder with a non-finite reward."""

from pydantic import Field

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.registry import register_algorithm, register_trajectory_builder
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig


class PoisonedConfig(GRPOConfig, name="poisoned"):
    """Settings of GRPO, and what is broken."""

    count: int = Field(default=1, description="How many samples of the second job.")


class Poisoned(GRPO):
    """Counts its jobs."""

    num_jobs = 0

    def credit(self, samples):
        found = super().credit(samples)
        if self.num_jobs == 1:
            for advantages in found[: self.config.count]:
                advantages[:] = float("nan")
        self.num_jobs += 1
        return found


class UnknownConfig(GroupTrajectoryBuilderConfig, name="unknown_reward"):
    """Settings of a group builder."""


class Unknown(GroupTrajectoryBuilder):
    """A user's builder that, from the second epoch on, returns NaN instead of None for an unknown reward."""

    async def compute_reward(self, output_item, meta=None):
        return float("nan") if meta["epoch"] else await super().compute_reward(output_item, meta)


@register_trajectory_builder(config_type=UnknownConfig)
async def unknown(config, builder):
    yield Unknown(config, ["agent"])


@register_algorithm(config_type=PoisonedConfig)
async def poisoned(config, builder):
    yield Poisoned(config)
