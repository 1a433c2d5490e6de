"""Losses of clients that send a number for every token: supervised weights, and direct reward optimization.

They are written as sums over tokens with the client's numbers in `advantages`; `Learner.accumulate` adds them up.
Shapes: B samples, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, register_loss
from reinforge.engine.token_batch import TokenBatch


@register_loss("weighted_cross_entropy")
def weighted_cross_entropy(batch: TokenBatch, logprobs_BT: Tensor) -> LossOutput:
    """Returns the negative log-likelihood with the advantages as weights, l_t = -A_t log p(t)."""
    return LossOutput(-batch.advantages * logprobs_BT)


@register_loss("dro")
def dro(batch: TokenBatch, logprobs_BT: Tensor, *, beta: float) -> LossOutput:
    """Returns a quadratic penalty instead of a clip (Direct Reward Optimization, arXiv:2405.19107; Kimi k1.5,
    arXiv:2501.12599).

    l_t = -A_t log p(t) + beta / 2 (log p(t) - log p_old(t))^2
    Differs from the papers: one number per token instead of per reply, and the client computes the advantages.
    """
    d_BT = torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0)
    return LossOutput(-batch.advantages * logprobs_BT + beta / 2 * d_BT**2, {"approx_kl": d_BT.detach() ** 2 / 2})
