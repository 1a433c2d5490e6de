"""The loss of on-policy distillation, whose advantages come from a teacher. Shapes: B samples, T tokens."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, register_loss
from reinforge.engine.losses.policy_gradient import SharedParams, clipped_pg
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError


@register_loss("distill")
def distill(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns the clipped policy-gradient loss of the advantages, and reports the divergence from the teacher.

    The metric `teacher_kl` is the mean of log p_sampler - log p_teacher over the sampled tokens, which estimates the
    reverse KL per token of the policy that sampled them.

    Args:
        batch: As for `clipped_pg`, with the teacher's log-probs as those of the reference.

    Raises:
        ConfigError: The batch has no log-probs of a teacher.
    """
    if batch.ref_logprobs is None:
        raise ConfigError("distill: the batch has no log-probs of a teacher; set `teacher` on the algorithm")
    output = clipped_pg(batch, logprobs_BT, clip_low=clip_low, clip_high=clip_high, **shared)
    divergence_BT = torch.where(batch.loss_mask, batch.sampling_logprobs - batch.ref_logprobs, 0.0)
    return LossOutput(output.loss, {**output.metrics, "teacher_kl": divergence_BT})
