"""REINFORCE++ (arXiv:2501.03262, eq. 8 to 10): advantages normalized over the batch, without critic or groups.

    A_t = R - kl_coef sum_{i >= t} log p_old(i) / p_ref(i),    then (A - mean) / std over all trained tokens

With `baseline: group` (the paper's "w/ baseline") the group's mean is first subtracted from R, and the KL goes into the
loss as k2. A group's standard deviation depends on the reward that it divides, which biases GRPO; the batch's hardly
does.

Differs from the paper: turns are not discounted, and `kl_coef` is 0 unless set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from reinforge.algorithms.policy_gradient import (
    Aggregation,
    ClippedConfig,
    PolicyGradient,
    normalize_over_batch,
    ref_kl,
)
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample


class ReinforcePPConfig(ClippedConfig, name="reinforce_pp"):
    """Settings of REINFORCE++."""

    baseline: Literal["none", "group"] = Field(
        default="none",
        description="none: plain rewards, KL in the reward; group: subtract the group's mean, KL in the loss.",
    )
    loss_aggregation: Aggregation = "token"
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k2", description="baseline group: the estimator in the loss; the KL in the reward is k1."
    )


@register_algorithm(config_type=ReinforcePPConfig)
class ReinforcePP(PolicyGradient):
    """Advantages normalized over the batch, clipped policy gradient."""

    config: ReinforcePPConfig
    config_type = ReinforcePPConfig

    def build_loss(self) -> LossSpec:
        """Returns the clipped policy-gradient loss, with the KL unless it is in the reward."""
        self.needs_groups = self.config.baseline == "group"
        spec = super().build_loss()
        return spec if self.needs_groups else LossSpec(spec.name, {**spec.params, "kl_coef": 0.0})

    def compute_advantage(self, reward: float, group_rewards: Sequence[float]) -> float:
        return super().compute_advantage(reward, group_rewards) if self.needs_groups else reward

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns advantages normalized over the trained tokens of all samples."""
        credits = super().credit(samples)
        if self.config.kl_coef and not self.needs_groups:
            self._subtract_kl(samples, credits)
        trained = [credit[sample.loss_mask] for sample, credit in zip(samples, credits, strict=True)]
        for sample, credit, values in zip(samples, credits, normalize_over_batch(trained), strict=True):
            credit[sample.loss_mask] = values
        return credits

    def _subtract_kl(self, samples: Sequence[TrainingSample], credits: Sequence[FloatArray]) -> None:
        """Subtracts from each token's advantage the KL of this and all later tokens of its trajectory."""
        later: dict[int, float] = {}
        for sample, credit in reversed(list(zip(samples, credits, strict=True))):
            to_go = np.cumsum(ref_kl(sample)[::-1])[::-1] + later.get(sample.trajectory_index, 0.0)
            credit -= np.where(sample.loss_mask, self.config.kl_coef * to_go, 0).astype(np.float32)
            later[sample.trajectory_index] = float(to_go[0])
