"""Losses: pure functions on one `TokenBatch`, found by name.

    @register_loss("my_loss")
    def my_loss(batch: TokenBatch, logprobs_BT: Tensor, *, scale: float = 1.0) -> LossOutput: ...

The learner sums: the loss of an optimizer step is sum_t w_s l_t / sum_t w_s over all trained tokens of the step,
w_s the sample's weight, so how a step is cut into micro-batches does not change it. A loss of one number a sample is
sum_s w_s l_s / sum_s w_s.
Shapes: B samples, T tokens, P pairs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reinforge.engine.batch import TokenBatch
from reinforge.errors import ConfigError, Problem, TrajectoryError, describe_error, did_you_mean
from reinforge.types.sample import LossSpec


@dataclass(slots=True)
class LossOutput:
    """What a loss returns.

    Attributes:
        loss: `[B, T]` loss of each token, read where `loss_mask` is True; or `[B]` loss of each sample.
        metrics: Name -> `[B, T]` or `[B]` without gradient; the learner reports means over a step's trained tokens or
            samples.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[..., LossOutput]
_LOSSES: dict[str, Loss] = {}


def register_loss(name: str) -> Callable[[Loss], Loss]:
    """Registers `loss(batch, logprobs_BT, **params)` under a name that `LossSpec.name` can give."""

    def register(loss: Loss) -> Loss:
        _LOSSES[name] = loss
        return loss

    return register


def find_loss(spec: LossSpec) -> Loss:
    """Returns the loss that a spec names: a registered one, or `package.module:function`, which is imported now.

    The second form keeps torch out of the module that holds a user's algorithm.

    Raises:
        ConfigError: No loss has that name, or it does not take these parameters.
    """
    loss = _imported(spec.name) if ":" in spec.name else _LOSSES.get(spec.name)
    if loss is None:
        names = ", ".join(sorted(_LOSSES))
        message = f'no loss named "{spec.name}"{did_you_mean(spec.name, _LOSSES)}'
        raise ConfigError(
            Problem("finetuning.algorithm", message, f"registered: {names}; or name yours as package.module:function")
        )
    parameters = inspect.signature(loss).parameters.values()
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = [name for name in spec.params if name not in allowed]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        message = f'the loss "{spec.name}" takes no "{unknown[0]}"{did_you_mean(unknown[0], allowed)}'
        raise ConfigError(Problem("finetuning.algorithm", message, f"it takes: {', '.join(allowed) or 'nothing'}"))
    return loss


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ConfigError(
            Problem("finetuning.algorithm", f'the loss "{name}" cannot be imported: {describe_error(error)}')
        ) from error


@register_loss("cross_entropy")
def cross_entropy(batch: TokenBatch, logprobs_BT: Tensor) -> LossOutput:
    """Returns the negative log-likelihood, l_t = -log p(t): supervised fine-tuning.

    Args:
        batch: The tokens.
        logprobs_BT: log p of each trained token under the weights being trained.
    """
    return LossOutput(-logprobs_BT)


@register_loss("clipped_pg")
def clipped_pg(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    constant_length: int | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """Returns the clipped policy gradient with an optional penalty for leaving the reference.

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef KL_t - entropy_coef H_t
    with r_t = p(t) / p_old(t): the surrogate of PPO (arXiv:1707.06347, eq. 7) as GRPO uses it (arXiv:2402.03300,
    eq. 3). With dual_clip c, where A_t < 0: -max(min(..), c A_t) (arXiv:1912.09729), which bounds what one token whose
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
        kl_coef: Weight of the penalty; 0 needs no reference.
        kl_estimator: `k1`, `k2` or `k3`.
        entropy_coef: Weight of the entropy bonus.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    log_ratio_BT = torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0)
    ratio_BT = log_ratio_BT.exp()
    gain_BT = _clipped_gain(ratio_BT, batch.advantages, clip_low, clip_high)
    metrics = _ratio_metrics(ratio_BT, log_ratio_BT, gain_BT, batch.advantages)
    if dual_clip is not None:
        floor_BT = torch.where(batch.advantages < 0, dual_clip * batch.advantages, -torch.inf)
        metrics["dual_clip_fraction"] = (gain_BT < floor_BT).detach().float()
        gain_BT = torch.maximum(gain_BT, floor_BT)
    penalty_BT = _penalty(batch, logprobs_BT, metrics, kl_coef, kl_estimator, entropy_coef)
    loss_BT = penalty_BT - gain_BT
    if constant_length is None:
        return LossOutput(loss_BT, metrics)
    return LossOutput(torch.where(batch.loss_mask, loss_BT, 0.0).sum(dim=1) / constant_length, metrics)


@register_loss("gspo")
def gspo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """Returns the policy gradient clipped by the ratio of whole sequences (GSPO, arXiv:2507.18071, eq. 5, 7, 13, 14).

    l_t = -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef KL_t - entropy_coef H_t
    with s_t = sg[s] p(t) / sg[p(t)] and s = exp(mean over the sample's trained tokens of log p / p_old): the paper's
    form by tokens, whose gradient is that of the form by sequences where a sample's tokens have one advantage, and
    which can carry advantages by turn.

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: s counts down to 1 - clip_low.
        clip_high: s counts up to 1 + clip_high.
        kl_coef: Weight of the penalty; 0 needs no reference.
        kl_estimator: `k1`, `k2` or `k3`.
        entropy_coef: Weight of the entropy bonus.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    log_ratio_BT = torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0)
    mean_B1 = _means(log_ratio_BT, batch.loss_mask)[:, None]
    log_ratio_BT = torch.where(batch.loss_mask, mean_B1.detach() + logprobs_BT - logprobs_BT.detach(), 0.0)
    ratio_BT = log_ratio_BT.exp()
    gain_BT = _clipped_gain(ratio_BT, batch.advantages, clip_low, clip_high)
    metrics = _ratio_metrics(ratio_BT, log_ratio_BT, gain_BT, batch.advantages)
    return LossOutput(_penalty(batch, logprobs_BT, metrics, kl_coef, kl_estimator, entropy_coef) - gain_BT, metrics)


@register_loss("cispo")
def cispo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> LossOutput:
    """Returns REINFORCE weighted by clipped ratios: each token keeps a gradient (CISPO, arXiv:2506.13585, eq. 4, 5).

    l_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log p(t) + kl_coef KL_t - entropy_coef H_t
    with r_t = p(t) / p_old(t).

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: The ratio counts down to 1 - clip_low; None: down to 0, as in the paper.
        clip_high: The ratio counts up to 1 + clip_high.
        kl_coef: Weight of the penalty; 0 needs no reference.
        kl_estimator: `k1`, `k2` or `k3`.
        entropy_coef: Weight of the entropy bonus.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    log_ratio_BT = torch.where(batch.loss_mask, logprobs_BT - batch.old_logprobs, 0.0).detach()
    ratio_BT = log_ratio_BT.exp()
    weight_BT = ratio_BT.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    metrics = {
        "ratio": ratio_BT,
        "clip_fraction": (weight_BT != ratio_BT).float(),
        "approx_kl": ratio_BT - 1 - log_ratio_BT,
    }
    penalty_BT = _penalty(batch, logprobs_BT, metrics, kl_coef, kl_estimator, entropy_coef)
    return LossOutput(penalty_BT - weight_BT * batch.advantages * logprobs_BT, metrics)


@register_loss("dpo")
def dpo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_coef: float = 0.0,
    length_normalised: bool = False,
) -> LossOutput:
    """Returns the logistic loss of preferring one sample to the other (DPO, arXiv:2305.18290, eq. 7).

    l = -(1 - e) log sigma(beta h) - e log sigma(-beta h) - sft_coef (log p of the preferred) / (its tokens)
    with h = log p / p_ref of the preferred sample less that of the other, each summed over its trained tokens, or
    their means if length_normalised (as in Tulu 3, arXiv:2411.15124). e is the label smoothing of conservative DPO, the
    share of pairs taken to be labelled wrongly (Mitchell, "A note on DPO with noisy preferences", 2023); the last term
    is RPO's (arXiv:2404.19733, eq. 1).
    Each sample of a pair carries the loss of the pair, so means over samples are means over pairs.

    Args:
        batch: Whole pairs, with reference log-probs.
        logprobs_BT: log p of each trained token under the weights being trained.
        beta: How steep the loss is in nats of h.
        label_smoothing: In [0, 0.5).
        sft_coef: Weight of the preferred sample's own likelihood.
        length_normalised: Means instead of sums over tokens.

    Raises:
        ConfigError: The batch has no reference log-probs.
        TrajectoryError: A sample is here without its pair.
    """
    h_P, metrics = _preference(batch, logprobs_BT, length_normalised, "dpo")
    loss_P = -(1 - label_smoothing) * logsigmoid(beta * h_P) - label_smoothing * logsigmoid(-beta * h_P)
    if sft_coef:
        likelihood_P = _means(logprobs_BT, batch.loss_mask)[_pairs_of(batch, "dpo")[:, 0]]
        loss_P = loss_P - sft_coef * likelihood_P
        metrics["chosen_nll"] = _on_samples(batch, -likelihood_P.detach())
    return LossOutput(_on_samples(batch, loss_P), metrics)


@register_loss("ipo")
def ipo(batch: TokenBatch, logprobs_BT: Tensor, *, beta: float = 0.1, length_normalised: bool = False) -> LossOutput:
    """Returns the squared distance of the margin from its target (IPO, arXiv:2310.12036, eq. 17).

    l = (h - 1 / (2 beta))^2, h as in `dpo`; beta is the paper's tau. Unlike DPO's, the margin stops growing.

    Args:
        batch: Whole pairs, with reference log-probs.
        logprobs_BT: log p of each trained token under the weights being trained.
        beta: The target margin is 1 / (2 beta) nats.
        length_normalised: Means instead of sums over tokens, so the target is nats a token.

    Raises:
        ConfigError: The batch has no reference log-probs.
        TrajectoryError: A sample is here without its pair.
    """
    h_P, metrics = _preference(batch, logprobs_BT, length_normalised, "ipo")
    return LossOutput(_on_samples(batch, (h_P - 1 / (2 * beta)) ** 2), metrics)


def kl_to_reference(batch: TokenBatch, logprobs_BT: Tensor, estimator: str = "k3") -> Tensor:
    """Returns an estimate of KL(p, p_ref) from each token drawn from p, `[B, T]` (Schulman, "Approximating KL
    divergence", 2020).

    With d = log p - log p_ref: k1 = d, without bias and of high variance; k2 = d^2 / 2, of low variance and biased;
    k3 = exp(-d) - 1 + d, without bias and never negative. Of the three, only the mean gradient of k2 is the
    divergence's own on policy; that of k1 is zero, so k1 belongs into a reward.

    Raises:
        ConfigError: The batch has no reference log-probs, or there is no such estimator.
    """
    if batch.ref_logprobs is None:
        raise ConfigError("this loss needs ref_logprobs; let the algorithm's needs ask for them")
    d_BT = torch.where(batch.loss_mask, logprobs_BT - batch.ref_logprobs, 0.0)
    if estimator == "k1":
        return d_BT
    if estimator == "k2":
        return d_BT**2 / 2
    if estimator == "k3":
        return (-d_BT).exp() - 1 + d_BT
    raise ConfigError(f'there is no KL estimator "{estimator}"; there are k1, k2 and k3')


def _clipped_gain(ratio_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


@torch.no_grad()
def _ratio_metrics(ratio_BT: Tensor, log_ratio_BT: Tensor, gain_BT: Tensor, advantages_BT: Tensor) -> dict[str, Tensor]:
    return {
        "ratio": ratio_BT.detach(),
        "clip_fraction": (gain_BT < ratio_BT * advantages_BT).float(),
        "approx_kl": (ratio_BT - 1 - log_ratio_BT).detach(),
    }


def _penalty(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    metrics: dict[str, Tensor],
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
) -> Tensor:
    """Returns kl_coef KL_t - entropy_coef H_t, `[B, T]`, and adds the metric `kl_ref`."""
    penalty_BT = torch.zeros_like(logprobs_BT)
    if kl_coef:
        kl_BT = kl_to_reference(batch, logprobs_BT, kl_estimator)
        metrics["kl_ref"] = kl_BT.detach()
        penalty_BT = penalty_BT + kl_coef * kl_BT
    if entropy_coef and batch.entropies is not None:
        penalty_BT = penalty_BT - entropy_coef * batch.entropies
    return penalty_BT


def _means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns the mean over each sample's trained tokens, `[B]`."""
    return torch.where(mask_BT, values_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def _pairs_of(batch: TokenBatch, name: str) -> Tensor:
    """Returns the batch's pairs, `[P, 2]`, of which every sample is in exactly one."""
    if batch.pairs is None or batch.pairs.numel() != len(batch.lengths):
        raise TrajectoryError(f"{name}: every sample needs a pair_id that one other sample of the step has too")
    return batch.pairs


def _preference(
    batch: TokenBatch, logprobs_BT: Tensor, length_normalised: bool, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns h of each pair, `[P]`, and what is told of it."""
    pairs_P2 = _pairs_of(batch, name)
    log_ratio_BT = kl_to_reference(batch, logprobs_BT, "k1")
    log_ratio_B = _means(log_ratio_BT, batch.loss_mask) if length_normalised else log_ratio_BT.sum(dim=1)
    chosen_P, rejected_P = log_ratio_B[pairs_P2].unbind(dim=1)
    told = {
        "margin": chosen_P - rejected_P,
        "chosen_logratio": chosen_P,
        "rejected_logratio": rejected_P,
        "pair_accuracy": (chosen_P > rejected_P).float(),
    }
    return chosen_P - rejected_P, {key: _on_samples(batch, value.detach()) for key, value in told.items()}


def _on_samples(batch: TokenBatch, values_P: Tensor) -> Tensor:
    """Returns the value of each sample's pair, `[B]`."""
    assert batch.pairs is not None
    empty_B = values_P.new_zeros(len(batch.lengths))
    return empty_B.index_put((batch.pairs.T.flatten(),), values_P.repeat(2))
