"""REINFORCE leave-one-out (RLOO, arXiv:2402.14740, section 2.4): a reward less the mean of the other siblings'.

    A_i = R_i - mean_{j != i} R_j,    R = r - kl_coef log p(y) / p_ref(y),    loss_i = -A_i log p(y_i)

The whole reply is one action, so its tokens' losses are summed, not averaged.

Differs from the paper: sums are divided by `constant_length`, which scales the gradient and changes nothing else;
samples that later steps of a job see stale are corrected by PPO's clipped ratio, whose gradient in the first step is
REINFORCE's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from reinforge.algorithms.advantages import leave_one_out
from reinforge.algorithms.policy_gradient import Aggregation, ClippedConfig, PolicyGradient, ref_kl
from reinforge.algorithms.samples import on_mask
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample


class RLOOConfig(ClippedConfig, name="rloo"):
    """Settings of RLOO; the KL is taken off the reward: k1, summed over the reply."""

    aggregation: Aggregation = "constant"


class RLOO(PolicyGradient):
    """Leave-one-out credit, summed over each reply."""

    config: RLOOConfig

    def __init__(self, config: RLOOConfig | None = None):
        super().__init__(config or RLOOConfig())

    def loss_of(self) -> LossSpec:
        """Returns the clipped policy gradient; the KL is not in it."""
        spec = super().loss_of()
        return LossSpec(spec.name, {**spec.params, "kl_coef": 0.0})

    def compare(self, reward: float, siblings: Sequence[float]) -> float:
        """Returns the reward less the mean of the other siblings'."""
        return leave_one_out(reward, siblings)

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns leave-one-out advantages, of the reward and, being linear, of the KL apart."""
        credits = super().credit(samples)
        if not self.config.kl_coef:
            return credits
        totals: dict[str, dict[int, float]] = {}
        for sample in samples:
            group = totals.setdefault(sample.group_id, {})
            group[sample.trajectory_index] = group.get(sample.trajectory_index, 0.0) + float(ref_kl(sample).sum())
        for sample, credit in zip(samples, credits, strict=True):
            group = totals[sample.group_id]
            excess = leave_one_out(group[sample.trajectory_index], list(group.values()))
            credit -= on_mask(sample, self.config.kl_coef * excess)
        return credits


@register_algorithm(config_type=RLOOConfig)
async def rloo(config: RLOOConfig, builder: Any) -> AsyncIterator[RLOO]:
    """Yields RLOO."""
    yield RLOO(config)
