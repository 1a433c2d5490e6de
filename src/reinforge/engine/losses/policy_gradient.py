"""Policy-gradient losses: advantage times a probability ratio that is bounded in one way or another.

Each loss defines the objective g_t of a token; all of them then return

    l_t = -c_t g_t + kl_coef KL_t - entropy_coef H_t        with c_t = min(p_old(t) / p_sampler(t), tis_cap)

c_t is truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", 2025). In bfloat16 the kernels of sampler and learner round differently, so the learner computes p_old
itself, and c_t gives less weight to tokens that the sampler overestimated. The same holds for tokens that an older
version sampled: r_t then bounds the step from the weights at the start of the job, and c_t corrects for the version
(the decoupled objective of AReaL, arXiv:2505.24298, with a cap). Where p_old is the sampler's own, c_t is 1.
In `gspo` c_t, like the ratio, is the geometric mean over the sample's tokens.
Shapes: B samples, T tokens.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, kl_to_reference, mean_by_sample, register_loss
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError


class SharedParams(TypedDict, total=False):
    """Parameters that every policy-gradient loss takes."""

    tis_cap: float | None  # upper limit of the importance weight c_t; None: no importance sampling
    kl_coef: float  # weight of the KL penalty toward the reference; 0 needs no reference
    kl_estimator: str  # `k1`, `k2` or `k3`
    entropy_coef: float  # weight of the entropy bonus


@register_loss("clipped_pg")
def clipped_pg(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    constant_length: int | None = None,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns the clipped policy-gradient loss with an optional KL penalty.

    g_t = min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    with r_t = p(t) / p_old(t): the surrogate of PPO (arXiv:1707.06347, eq. 7) as GRPO uses it (arXiv:2402.03300,
    eq. 3). With dual_clip c, where A_t < 0: max(min(..), c A_t) (arXiv:1912.09729), which limits the effect of a token
    whose ratio explodes. With constant_length L: one number per sample, sum_t l_t / L, instead of a mean over tokens
    (Dr. GRPO, arXiv:2503.20783).
    Differs from the papers: the two ends of the clip are separate; the mean is over the tokens of a step.

    Args:
        dual_clip: The ratio is clipped here where the advantage is negative; above 1; None: not clipped.
        constant_length: Divisor of the sum over each sample, whatever its length; None: the mean over tokens.
    """
    gain_BT, metrics = _clip(_log_ratio(batch, logprobs_BT), batch.advantages, clip_low, clip_high)
    if dual_clip is not None:
        floor_BT = torch.where(batch.advantages < 0, dual_clip * batch.advantages, -torch.inf)
        metrics["dual_clip_fraction"] = (gain_BT < floor_BT).detach().float()
        gain_BT = torch.maximum(gain_BT, floor_BT)
    loss_BT = _finish_loss(batch, logprobs_BT, gain_BT, metrics, **shared)
    if constant_length is None:
        return LossOutput(loss_BT, metrics)
    return LossOutput(torch.where(batch.loss_mask, loss_BT, 0.0).sum(dim=1) / constant_length, metrics)


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

    The reference's log-probs are those of the teacher. The metric `teacher_kl` is the mean of log p_sampler -
    log p_teacher over the sampled tokens, which estimates the reverse KL per token of the policy that sampled them.
    """
    if batch.ref_logprobs is None:
        raise ConfigError("distill: the batch has no log-probs of a teacher; set `teacher` on the algorithm")
    output = clipped_pg(batch, logprobs_BT, clip_low=clip_low, clip_high=clip_high, **shared)
    divergence_BT = torch.where(batch.loss_mask, batch.sampling_logprobs - batch.ref_logprobs, 0.0)
    return LossOutput(output.loss, {**output.metrics, "teacher_kl": divergence_BT})


@register_loss("ppo")
def ppo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    value_clip: float | None = None,
    value_coef: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns the clipped policy-gradient loss plus the critic's squared error (PPO, arXiv:1707.06347, eq. 9).

    l_t = clipped_pg_t + value_coef max((V_t - R_t)^2, (V_old + clip(V_t - V_old, +-value_clip) - R_t)^2) / 2
    Differs from the paper: the value can be clipped like the ratio, as its authors' code does (arXiv:2005.12729,
    section 3); the error has a factor of 1/2.

    Args:
        value_clip: How far a value may move from its value before the job; None: no limit.

    Raises:
        ConfigError: The batch has no returns or no values.
    """
    if batch.values is None or batch.old_values is None or batch.returns is None:
        raise ConfigError(
            "ppo: the batch has no values or returns; load the engine with critic=True and use Needs(values=True)"
        )
    policy = clipped_pg(batch, logprobs_BT, clip_low=clip_low, clip_high=clip_high, **shared)
    errors_BT = (batch.values - batch.returns) ** 2
    if value_clip is not None:
        change_BT = (batch.values - batch.old_values).clamp(-value_clip, value_clip)
        errors_BT = torch.maximum(errors_BT, (batch.old_values + change_BT - batch.returns) ** 2)
    metrics = {"value": batch.values.detach(), "return": batch.returns, "value_error": errors_BT.detach()}
    return LossOutput(policy.loss + value_coef * errors_BT / 2, {**policy.metrics, **metrics})


@register_loss("gspo")
def gspo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns the policy-gradient loss with a ratio per sequence (GSPO, arXiv:2507.18071, eq. 5, 7, 13, 14).

    g_t = min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    with s_t = sg[s] p(t) / sg[p(t)] and s = exp(mean over the sample's trained tokens of log p / p_old). This is the
    paper's token-level form: its gradient equals that of the sequence-level form where all tokens of a sample have one
    advantage, and it also takes advantages per turn.
    """
    mean_B1 = mean_by_sample(_log_ratio(batch, logprobs_BT), batch.loss_mask)[:, None]
    log_ratio_BT = torch.where(batch.loss_mask, mean_B1.detach() + logprobs_BT - logprobs_BT.detach(), 0.0)
    gain_BT, metrics = _clip(log_ratio_BT, batch.advantages, clip_low, clip_high)
    return LossOutput(_finish_loss(batch, logprobs_BT, gain_BT, metrics, by_sample=True, **shared), metrics)


@register_loss("cispo")
def cispo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns REINFORCE with clipped importance weights, so every token has a gradient (CISPO, arXiv:2506.13585,
    eq. 4, 5).

    g_t = sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log p(t)
    with r_t = p(t) / p_old(t).

    Args:
        clip_low: The weight is clipped below at 1 - clip_low; None: not clipped below, as in the paper.
    """
    log_ratio_BT = _log_ratio(batch, logprobs_BT).detach()
    ratio_BT = log_ratio_BT.exp()
    weight_BT = ratio_BT.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    metrics = _ratio_metrics(ratio_BT, log_ratio_BT, weight_BT != ratio_BT)
    gain_BT = weight_BT * batch.advantages * logprobs_BT
    return LossOutput(_finish_loss(batch, logprobs_BT, gain_BT, metrics, **shared), metrics)


@register_loss("sapo")
def sapo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **shared: Unpack[SharedParams],
) -> LossOutput:
    """Returns the policy-gradient loss with a soft gate instead of a clip (SAPO, arXiv:2511.20347, eq. 5, 6).

    g_t = 4 / tau sigma(tau (r_t - 1)) A_t
    with r_t = p(t) / p_old(t) and tau = tau_pos where A_t > 0, else tau_neg. Its gradient is that of r_t A_t times
    4 p (1 - p) with p = sigma(tau (r_t - 1)), which is 1 at r_t = 1 and reported as `gate`.
    """
    log_ratio_BT = _log_ratio(batch, logprobs_BT)
    ratio_BT = log_ratio_BT.exp()
    tau_BT = torch.where(batch.advantages > 0, tau_pos, tau_neg)
    share_BT = torch.sigmoid(tau_BT * (ratio_BT - 1))
    metrics = _ratio_metrics(ratio_BT, log_ratio_BT)
    metrics["gate"] = (4 * share_BT * (1 - share_BT)).detach()
    gain_BT = 4 / tau_BT * share_BT * batch.advantages
    return LossOutput(_finish_loss(batch, logprobs_BT, gain_BT, metrics, **shared), metrics)


def _log_ratio(batch: TokenBatch, logprobs_BT: Tensor) -> Tensor:
    return torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0)


def _clip(
    log_ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns min(r A, clip(r) A), `[B, T]`, and metrics of the ratio."""
    ratio_BT = log_ratio_BT.exp()
    gain_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT)
    return gain_BT, _ratio_metrics(ratio_BT, log_ratio_BT, gain_BT < ratio_BT * advantages_BT)


def _ratio_metrics(ratio_BT: Tensor, log_ratio_BT: Tensor, clipped_BT: Tensor | None = None) -> dict[str, Tensor]:
    ratio_BT, log_ratio_BT = ratio_BT.detach(), log_ratio_BT.detach()
    metrics = {"ratio": ratio_BT, "approx_kl": ratio_BT - 1 - log_ratio_BT}
    if clipped_BT is None:
        return metrics
    low_BT, high_BT = clipped_BT & (ratio_BT < 1), clipped_BT & (ratio_BT > 1)
    fractions = {"clip_fraction": clipped_BT, "clip_fraction_low": low_BT, "clip_fraction_high": high_BT}
    return {**metrics, **{name: fraction_BT.float() for name, fraction_BT in fractions.items()}}


def _finish_loss(
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
    if tis_cap is not None and batch.old_logprobs_from_learner:
        sampled_BT = batch.loss_mask & ~batch.sampling_logprobs.isnan()
        excess_BT = torch.where(sampled_BT, batch.old_logprobs - batch.sampling_logprobs, 0.0)
        if by_sample:
            excess_BT = mean_by_sample(excess_BT, sampled_BT)[:, None].expand_as(excess_BT)
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
