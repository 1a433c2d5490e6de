"""Losses that follow the policy gradient: credit times a ratio, bounded in one way or another.

Each says by its gain g_t what a token's credit is worth under the weights being trained; all of them then become

    l_t = -c_t g_t + kl_coef KL_t - entropy_coef H_t        with c_t = min(p_old(t) / p_sampler(t), tis_cap)

c_t is truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025): where the learner has computed p_old itself, as it does in bfloat16, whose kernels give the sampler
other log-probs than the learner, what was drawn too often counts less. Where p_old is the sampler's own, c_t is 1. In
`gspo` it is, as the ratio, the geometric mean over the sample's tokens.
Shapes: B samples, T tokens.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, kl_to_reference, mean_by_sample, register_loss
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError


class Shared(TypedDict, total=False):
    """What every policy gradient takes.

    Attributes:
        tis_cap: Most that a token counts for being drawn too seldom; None: the sampler is taken at its word.
        kl_coef: Weight of the penalty for leaving the reference; 0 needs no reference.
        kl_estimator: `k1`, `k2` or `k3`.
        entropy_coef: Weight of the entropy bonus.
    """

    tis_cap: float | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float


@register_loss("clipped_pg")
def clipped_pg(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    constant_length: int | None = None,
    **shared: Unpack[Shared],
) -> LossOutput:
    """Returns the clipped policy gradient with an optional penalty for leaving the reference.

    g_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    with r_t = p(t) / p_old(t): the surrogate of PPO (arXiv:1707.06347, eq. 7) as GRPO uses it (arXiv:2402.03300,
    eq. 3). With dual_clip c, where A_t < 0: max(min(..), c A_t) (arXiv:1912.09729), which bounds what one token whose
    ratio has exploded can do. With constant_length L one number a sample, sum_t l_t / L, instead of means over tokens
    (Dr. GRPO, arXiv:2503.20783).
    Differs from the papers: the two ends of the clip are set apart; the mean is over the tokens of a step.

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: The ratio counts down to 1 - clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
        dual_clip: The ratio counts up to this where the advantage is negative, above 1; None: without end.
        constant_length: Divides the sum over each sample, whatever its length; None: the mean over tokens.
        shared: See `Shared`.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    gain_BT, metrics = _clipped(_log_ratio(batch, logprobs_BT), batch.advantages, clip_low, clip_high)
    if dual_clip is not None:
        floor_BT = torch.where(batch.advantages < 0, dual_clip * batch.advantages, -torch.inf)
        metrics["dual_clip_fraction"] = (gain_BT < floor_BT).detach().float()
        gain_BT = torch.maximum(gain_BT, floor_BT)
    loss_BT = _loss(batch, logprobs_BT, gain_BT, metrics, **shared)
    if constant_length is None:
        return LossOutput(loss_BT, metrics)
    return LossOutput(torch.where(batch.loss_mask, loss_BT, 0.0).sum(dim=1) / constant_length, metrics)


@register_loss("ppo")
def ppo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    value_clip: float | None = None,
    value_coef: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[Shared],
) -> LossOutput:
    """Returns the clipped policy gradient plus the critic's squared error (PPO, arXiv:1707.06347, eq. 9).

    l_t = clipped_pg_t + value_coef max((V_t - R_t)^2, (V_old + clip(V_t - V_old, +-value_clip) - R_t)^2) / 2
    Differs from the paper: the value can be clipped like the ratio, as its authors' code does (arXiv:2005.12729,
    section 3); the error has a factor of 1/2.

    Args:
        batch: As for `clipped_pg`, with returns, old values, and values by the critic as it is.
        logprobs_BT: log p of each trained token under the weights being trained.
        value_clip: How far a value may move from where it was before the job; None: freely.
        value_coef: Weight of the critic's error.
        clip_low: The ratio counts down to 1 - clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
        shared: See `Shared`.

    Raises:
        ConfigError: The batch has no returns or no values.
    """
    if batch.values is None or batch.old_values is None or batch.returns is None:
        raise ConfigError("ppo: needs values and returns; load the engine with critic=True and let the algorithm score")
    policy = clipped_pg(batch, logprobs_BT, clip_low=clip_low, clip_high=clip_high, **shared)
    errors_BT = (batch.values - batch.returns) ** 2
    if value_clip is not None:
        moved_BT = (batch.values - batch.old_values).clamp(-value_clip, value_clip)
        errors_BT = torch.maximum(errors_BT, (batch.old_values + moved_BT - batch.returns) ** 2)
    told = {"value": batch.values.detach(), "return": batch.returns, "value_error": errors_BT.detach()}
    return LossOutput(policy.loss + value_coef * errors_BT / 2, {**policy.metrics, **told})


@register_loss("gspo")
def gspo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **shared: Unpack[Shared],
) -> LossOutput:
    """Returns the policy gradient clipped by the ratio of whole sequences (GSPO, arXiv:2507.18071, eq. 5, 7, 13, 14).

    g_t = min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    with s_t = sg[s] p(t) / sg[p(t)] and s = exp(mean over the sample's trained tokens of log p / p_old): the paper's
    form by tokens, whose gradient is that of the form by sequences where a sample's tokens have one advantage, and
    which can carry advantages by turn.

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: s counts down to 1 - clip_low.
        clip_high: s counts up to 1 + clip_high.
        shared: See `Shared`.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    mean_B1 = mean_by_sample(_log_ratio(batch, logprobs_BT), batch.loss_mask)[:, None]
    log_ratio_BT = torch.where(batch.loss_mask, mean_B1.detach() + logprobs_BT - logprobs_BT.detach(), 0.0)
    gain_BT, metrics = _clipped(log_ratio_BT, batch.advantages, clip_low, clip_high)
    return LossOutput(_loss(batch, logprobs_BT, gain_BT, metrics, by_sample=True, **shared), metrics)


@register_loss("cispo")
def cispo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    **shared: Unpack[Shared],
) -> LossOutput:
    """Returns REINFORCE weighted by clipped ratios: each token keeps a gradient (CISPO, arXiv:2506.13585, eq. 4, 5).

    g_t = sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log p(t)
    with r_t = p(t) / p_old(t).

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: The ratio counts down to 1 - clip_low; None: down to 0, as in the paper.
        clip_high: The ratio counts up to 1 + clip_high.
        shared: See `Shared`.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    log_ratio_BT = _log_ratio(batch, logprobs_BT).detach()
    ratio_BT = log_ratio_BT.exp()
    weight_BT = ratio_BT.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    metrics = _ratio_metrics(ratio_BT, log_ratio_BT, weight_BT != ratio_BT)
    gain_BT = weight_BT * batch.advantages * logprobs_BT
    return LossOutput(_loss(batch, logprobs_BT, gain_BT, metrics, **shared), metrics)


def _log_ratio(batch: TokenBatch, logprobs_BT: Tensor) -> Tensor:
    """Returns log p / p_old of the trained tokens, `[B, T]`, 0 elsewhere."""
    return torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0)


def _clipped(
    log_ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns min(r A, clip(r) A), `[B, T]`, and what is told of the ratio."""
    ratio_BT = log_ratio_BT.exp()
    gain_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    return gain_BT, _ratio_metrics(ratio_BT, log_ratio_BT, gain_BT < ratio_BT * advantages_BT)


def _ratio_metrics(ratio_BT: Tensor, log_ratio_BT: Tensor, clipped_BT: Tensor) -> dict[str, Tensor]:
    ratio_BT, log_ratio_BT = ratio_BT.detach(), log_ratio_BT.detach()
    return {"ratio": ratio_BT, "clip_fraction": clipped_BT.float(), "approx_kl": ratio_BT - 1 - log_ratio_BT}


def _loss(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    gain_BT: Tensor,
    metrics: dict[str, Tensor],
    *,
    by_sample: bool = False,
    tis_cap: float | None = 2.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> Tensor:
    """Returns -c_t g_t + kl_coef KL_t - entropy_coef H_t, `[B, T]`, and adds the metrics `tis_weight` and `kl_ref`."""
    if tis_cap is not None and batch.old_is_learners:
        drawn_BT = batch.loss_mask & ~batch.sampling_logprobs.isnan()
        excess_BT = torch.where(drawn_BT, batch.old_logprobs - batch.sampling_logprobs, 0.0)
        if by_sample:
            excess_BT = mean_by_sample(excess_BT, drawn_BT)[:, None].expand_as(excess_BT)
        metrics["tis_weight"] = excess_BT.exp().clamp(max=tis_cap)
        gain_BT = metrics["tis_weight"] * gain_BT
    loss_BT = -gain_BT
    if kl_coef:
        kl_BT = kl_to_reference(batch, logprobs_BT, kl_estimator)
        metrics["kl_ref"] = kl_BT.detach()
        loss_BT = loss_BT + kl_coef * kl_BT
    if entropy_coef and batch.entropies is not None:
        loss_BT = loss_BT - entropy_coef * batch.entropies
    return loss_BT
