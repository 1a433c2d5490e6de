"""Proximal policy optimization with a critic (PPO, arXiv:1707.06347) and generalized advantages (arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lambda A_{t+1},    return_t = A_t + V_t

over the trained tokens of a trajectory, in order through all of its turns; V after the last token is 0.
The trajectory's reward is given at its last token, a turn's shaped reward at that turn's last token.

Differs from the papers: a time step is one trained token, so messages between two turns take none; `gamma` is 1, since
a longer reply is not worth less; `kl_coef` adds -kl_coef log(p_old / p_ref) to each token's reward, as in
arXiv:1909.08593, eq. 2. Values are not clipped unless `value_clip` is set: the clip depends on the scale of the rewards
and did not help in our runs (arXiv:2006.05990 found the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from pydantic import Field

from reinforge.algorithms.policy_gradient import TisCap, ref_kl
from reinforge.algorithms.samples import samples_from_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.errors import TrajectoryError
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup


class PPOConfig(AlgorithmConfig, name="ppo"):
    """Settings of PPO; the critic's settings are in `finetuning.policy.critic`."""

    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(
        default=0.95, ge=0, le=1, description="1: advantages from actual returns; 0: from the critic's next value."
    )
    normalize_advantages: bool = Field(
        default=True, description="Normalize to mean 0 and standard deviation 1 over a job's tokens."
    )
    value_clip: float | None = Field(
        default=None, gt=0, description="Maximum change of a value within a job, in the reward's unit; null: no limit."
    )
    value_coef: float = Field(default=0.5, gt=0, description="Weight of the critic's loss.")
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference model, in the reward.")
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    tis_cap: TisCap = 2.0


@register_algorithm(config_type=PPOConfig)
class PPO(Algorithm):
    """Advantages from a critic, clipped policy gradient; needs no siblings."""

    def __init__(self, config: PPOConfig | None = None):
        self.config = config or PPOConfig()
        self.needs = Needs(old_logprobs="inexact", values=True, ref_logprobs=self.config.kl_coef > 0)
        names = ("clip_low", "clip_high", "value_clip", "value_coef", "entropy_coef", "tis_cap")
        self.loss = LossSpec("ppo", {name: getattr(self.config, name) for name in names})

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        return samples_from_groups(groups)

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns each sample's advantages `[T]` and sets its `returns` `[T]`, the targets of its values."""
        config = self.config
        for _, members in groupby(samples, key=lambda sample: sample.trajectory_index):
            trajectory = list(members)
            values_N = np.concatenate([require_values(s)[s.loss_mask] for s in trajectory])
            rewards_N = compute_token_rewards(trajectory, config.kl_coef)
            advantages_N = compute_gae(rewards_N, values_N, config.gamma, config.gae_lambda)
            start = 0
            for sample in trajectory:
                part = slice(start, start + sample.num_trained)
                sample.advantages, sample.returns = (np.zeros(len(sample), np.float32) for _ in range(2))
                sample.advantages[sample.loss_mask] = advantages_N[part]
                sample.returns[sample.loss_mask] = advantages_N[part] + values_N[part]
                start = part.stop
        advantages = [sample.advantages for sample in samples if sample.advantages is not None]
        return normalize_advantages(samples, advantages) if config.normalize_advantages else advantages


def require_values(sample: TrainingSample) -> FloatArray:
    if sample.values is None:
        raise TrajectoryError("PPO needs the critic's values; call engine.score(samples, needs) before credit")
    return sample.values


def compute_token_rewards(samples: Sequence[TrainingSample], kl_coef: float = 0.0) -> FloatArray:
    """Returns the reward of each trained token of one trajectory, `[N]`, over its samples in order.

    Turn 0 with 2 tokens and shaped reward 0.5, turn 1 with 1 token and -0.1, reward 1  =>  [0, 0.5, 0.9]

    The reward of a turn that is not trained goes to the last trained token before it; without one it is dropped.
    """
    turns_N = np.concatenate([sample.turn_ids[sample.loss_mask] for sample in samples])
    rewards_N = np.zeros(len(turns_N), np.float32)
    for turn, reward in enumerate(samples[0].turn_rewards or ()):
        earlier = np.flatnonzero(turns_N <= turn)
        if len(earlier):
            rewards_N[earlier[-1]] += reward
    rewards_N[-1] += samples[0].reward
    if kl_coef:
        rewards_N -= np.float32(kl_coef) * np.concatenate([ref_kl(s)[s.loss_mask] for s in samples])
    return rewards_N


def compute_gae(
    rewards_N: FloatArray,
    values_N: FloatArray,
    gamma: float,
    gae_lambda: float,
    after: tuple[float, float] = (0.0, 0.0),
) -> FloatArray:
    """Returns A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438, eq. 16).

    Example: rewards [0, 1], values [0.5, 0.4], gamma 1, lambda 0.5: delta [-0.1, 0.6] -> [0.2, 0.6]. `after` has the
    advantage and the value after the last token.
    """
    advantages_N = np.zeros(len(rewards_N), np.float64)
    following, next_value = after
    for t in range(len(rewards_N) - 1, -1, -1):
        delta = float(rewards_N[t]) + gamma * next_value - float(values_N[t])
        following = delta + gamma * gae_lambda * following
        advantages_N[t], next_value = following, float(values_N[t])
    return advantages_N.astype(np.float32)


def normalize_advantages(samples: Sequence[TrainingSample], advantages: Sequence[FloatArray]) -> list[FloatArray]:
    """Returns advantages with mean 0 and standard deviation 1 over the trained tokens of all samples."""
    trained = [a[s.loss_mask] for s, a in zip(samples, advantages, strict=True)]
    values_N = np.concatenate(trained) if trained else np.zeros(0, np.float32)
    if not len(values_N):
        return list(advantages)
    mean, deviation = values_N.mean(dtype=np.float64), values_N.std(dtype=np.float64)
    return [
        np.where(s.loss_mask, (a - mean) / (deviation + 1e-8), 0).astype(np.float32)
        for s, a in zip(samples, advantages, strict=True)
    ]
