"""REINFORCE++ (arXiv:2501.03262, eq. 8 to 10): credit normalised over the whole batch, no critic, no groups needed.

    A_t = R - kl_coef sum_{i >= t} log p_old(i) / p_ref(i),    then (A - mean) / std over all trained tokens

With `baseline: group` (the paper's "w/ baseline") the siblings' mean is taken off R first, and the KL goes into the
loss as k2. A group's own deviation depends on the reward that it divides, which biases GRPO; the batch's hardly does.

Differs from the paper: turns are not discounted, and `kl_coef` is 0 unless set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from reinforge.algorithms.advantages import batch_normalised
from reinforge.algorithms.policy_gradient import Aggregation, ClippedConfig, PolicyGradient, ref_kl
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample


class ReinforcePPConfig(ClippedConfig, name="reinforce_pp"):
    """Settings of REINFORCE++."""

    baseline: Literal["none", "group"] = Field(
        default="none",
        description="none: rewards as they are, KL in the reward; group: less the siblings' mean, KL in the loss.",
    )
    aggregation: Aggregation = "token"
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k2", description="baseline group: the estimator in the loss; the KL in the reward is k1."
    )


class ReinforcePP(PolicyGradient):
    """Credit normalised over the batch, clipped policy gradient."""

    config: ReinforcePPConfig

    def __init__(self, config: ReinforcePPConfig | None = None):
        config = config or ReinforcePPConfig()
        self.needs_groups = config.baseline == "group"
        super().__init__(config)

    def loss_of(self) -> LossSpec:
        """Returns the clipped policy gradient, with the KL where it is not in the reward."""
        spec = super().loss_of()
        return spec if self.needs_groups else LossSpec(spec.name, {**spec.params, "kl_coef": 0.0})

    def compare(self, reward: float, siblings: Sequence[float]) -> float:
        """Returns the reward, less the siblings' mean where that is the baseline."""
        return super().compare(reward, siblings) if self.needs_groups else reward

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns advantages normalised over the trained tokens of all samples."""
        credits = super().credit(samples)
        if self.config.kl_coef and not self.needs_groups:
            self._take_off_kl(samples, credits)
        trained = [credit[sample.loss_mask] for sample, credit in zip(samples, credits, strict=True)]
        for sample, credit, values in zip(samples, credits, batch_normalised(trained), strict=True):
            credit[sample.loss_mask] = values
        return credits

    def _take_off_kl(self, samples: Sequence[TrainingSample], credits: Sequence[FloatArray]) -> None:
        """Takes the KL of each token and all later ones of its trajectory off its credit."""
        later: dict[int, float] = {}
        for sample, credit in reversed(list(zip(samples, credits, strict=True))):
            to_go = np.cumsum(ref_kl(sample)[::-1])[::-1] + later.get(sample.trajectory_index, 0.0)
            credit -= np.where(sample.loss_mask, self.config.kl_coef * to_go, 0).astype(np.float32)
            later[sample.trajectory_index] = float(to_go[0])


@register_algorithm(config_type=ReinforcePPConfig)
async def reinforce_pp(config: ReinforcePPConfig, builder: Any) -> AsyncIterator[ReinforcePP]:
    """Yields REINFORCE++."""
    yield ReinforcePP(config)
