"""Metrics of a step under astra-rl's names, next to those of the losses.

Shapes: P pairs, B = 2P probes for preferences (the preferred ones first) and B probes otherwise, T tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def build_preference_metrics(loss: Tensor, beta: float, logprobs_BT: Tensor, baseline_BT: Tensor) -> dict[str, float]:
    """Returns the metrics of DPO and IPO, means over the pairs.

    The implicit reward of a probe is beta (log p - log p_baseline), summed over its tokens.

    Args:
        beta: The algorithm's.
        logprobs_BT: The tester's log-probs, 0 where there is no token.
    """
    chosen_P, rejected_P = logprobs_BT.sum(dim=1).chunk(2)
    ref_chosen_P, ref_rejected_P = baseline_BT.sum(dim=1).chunk(2)
    reward_P, other_P = beta * (chosen_P - ref_chosen_P), beta * (rejected_P - ref_rejected_P)
    named = {
        "training/loss": loss,
        "reward/chosen_rewards": reward_P,
        "reward/rejected_rewards": other_P,
        "reward/reward_accuracies": (reward_P > other_P).float(),
        "reward/reward_margin": reward_P - other_P,
        "policy/logprobs_chosen": chosen_P,
        "policy/logprobs_rejected": rejected_P,
        "ref/logprobs_chosen": ref_chosen_P,
        "ref/logprobs_rejected": ref_rejected_P,
    }
    return {name: value.mean().item() for name, value in named.items()}


@torch.no_grad()
def build_ppo_metrics(
    loss: Tensor, metrics: Mapping[str, float], value_coef: float, rewards: Sequence[float]
) -> dict[str, Any]:
    """Returns the metrics of PPO that follow from those of its loss.

    Args:
        metrics: Metrics of the loss: `value_error` is the mean of the critic's squared error.
        value_coef: Weight of the critic's loss.
    """
    return {
        "training/loss": loss.item(),
        "training/policy_loss": loss.item() - value_coef * metrics["value_error"] / 2,
        "training/value_loss": metrics["value_error"],
        "reward/mean_reward": statistics.fmean(rewards),
        "reward/std_reward": statistics.stdev(rewards) if len(rewards) > 1 else None,
    }


@torch.no_grad()
def compute_token_mean(logprobs_BT: Tensor | None, mask_BT: Tensor) -> float | None:
    """Returns the mean log-prob of a batch's tokens; None if it is unknown."""
    if logprobs_BT is None or not mask_BT.any():
        return None
    return logprobs_BT[mask_BT].mean().item()
