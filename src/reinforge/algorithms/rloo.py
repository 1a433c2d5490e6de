"""REINFORCE leave-one-out (RLOO, arXiv:2402.14740, section 2.4): a reward minus the mean of its siblings' rewards.

    A_i = R_i - mean_{j != i} R_j,    R = r - kl_coef log p(y) / p_ref(y),    loss_i = -A_i log p(y_i)

The whole reply is one action, so the losses of its tokens are summed, not averaged.

Differs from the paper: sums are divided by `constant_length`, which only scales the gradient; samples that are stale in
later steps of a job are corrected by PPO's clipped ratio, whose gradient in the first step equals REINFORCE's.
"""

from __future__ import annotations

from collections.abc import Sequence

from reinforge.algorithms.policy_gradient import (
    Aggregation,
    ClippedConfig,
    PolicyGradient,
    leave_one_out_advantage,
    ref_kl,
)
from reinforge.algorithms.samples import fill_trained_tokens
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample


class RLOOConfig(ClippedConfig, name="rloo"):
    """Settings of RLOO; the KL is subtracted from the reward (k1, summed over the reply)."""

    loss_aggregation: Aggregation = "constant"


@register_algorithm(config_type=RLOOConfig)
class RLOO(PolicyGradient):
    """Leave-one-out advantages, loss summed over each reply."""

    config_type = RLOOConfig

    def build_loss(self) -> LossSpec:
        spec = super().build_loss()
        return LossSpec(spec.name, {**spec.params, "kl_coef": 0.0})

    def compute_advantage(self, reward: float, group_rewards: Sequence[float]) -> float:
        return leave_one_out_advantage(reward, group_rewards)

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns leave-one-out advantages; being linear, those of reward and KL are computed separately."""
        credits = super().credit(samples)
        if not self.config.kl_coef:
            return credits
        totals: dict[str, dict[int, float]] = {}
        for sample in samples:
            group = totals.setdefault(sample.group_id, {})
            group[sample.trajectory_index] = group.get(sample.trajectory_index, 0.0) + float(ref_kl(sample).sum())
        for sample, credit in zip(samples, credits, strict=True):
            group = totals[sample.group_id]
            excess = leave_one_out_advantage(group[sample.trajectory_index], list(group.values()))
            credit -= fill_trained_tokens(sample, self.config.kl_coef * excess)
        return credits
