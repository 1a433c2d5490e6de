"""Preference losses: prefer one sample of a pair to the other, or make single samples more or less likely.

Shapes: B samples, T tokens, P pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reinforge.engine.losses.base import LossOutput, kl_to_reference, mean_by_sample, register_loss
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import ConfigError, TrajectoryError

MAX_MEAN_LOGPROB = -1e-6
"""Mean log-probs are clamped here before their odds are taken: at 0 the odds are infinite, and so is a gradient."""


@register_loss("dpo")
def dpo(
    batch: TokenBatch,
    logprobs_BT: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    sft_coef: float = 0.0,
    length_normalized: bool = False,
) -> LossOutput:
    """Returns the logistic loss of preferring one sample to the other (DPO, arXiv:2305.18290, eq. 7).

    l = -(1 - e) log sigma(beta h) - e log sigma(-beta h) - sft_coef (log p of the preferred) / (its tokens)
    with h = log p / p_ref of the preferred sample minus that of the other, each summed over its trained tokens, or
    averaged if length_normalized (as in Tulu 3, arXiv:2411.15124). e is the label smoothing of conservative DPO, the
    share of pairs assumed to be mislabeled (Mitchell, "A note on DPO with noisy preferences", 2023); the last term
    is RPO's (arXiv:2404.19733, eq. 1).
    Both samples of a pair carry the loss of the pair, so means over samples are means over pairs.

    Args:
        label_smoothing: In [0, 0.5).
    """
    h_P, metrics = _compute_margins(batch, logprobs_BT, length_normalized, "dpo")
    loss_P = -(1 - label_smoothing) * logsigmoid(beta * h_P) - label_smoothing * logsigmoid(-beta * h_P)
    if sft_coef:
        likelihood_P = mean_by_sample(logprobs_BT, batch.loss_mask)[_get_pairs(batch, "dpo")[:, 0]]
        loss_P = loss_P - sft_coef * likelihood_P
        metrics["chosen_nll"] = _spread_to_samples(batch, -likelihood_P.detach())
    return LossOutput(_spread_to_samples(batch, loss_P), metrics)


@register_loss("ipo")
def ipo(batch: TokenBatch, logprobs_BT: Tensor, *, beta: float = 0.1, length_normalized: bool = False) -> LossOutput:
    """Returns the squared distance of the margin from its target (IPO, arXiv:2310.12036, eq. 17).

    l = (h - 1 / (2 beta))^2, h as in `dpo`; beta is the paper's tau. Unlike DPO's, the margin stops growing.

    Args:
        length_normalized: Average over tokens instead of summing; the target is then in nats per token.
    """
    h_P, metrics = _compute_margins(batch, logprobs_BT, length_normalized, "ipo")
    return LossOutput(_spread_to_samples(batch, (h_P - 1 / (2 * beta)) ** 2), metrics)


@register_loss("orpo")
def orpo(batch: TokenBatch, logprobs_BT: Tensor, *, odds_ratio_coef: float = 0.1) -> LossOutput:
    """Returns the likelihood of the preferred sample and the odds ratio of the two (ORPO, arXiv:2403.07691, eq. 6, 7).

    l = -m_w - odds_ratio_coef log sigma(log odds_w - log odds_l)
    with m the mean log-prob of a sample's trained tokens and log odds = m - log(1 - e^m). There is no reference.
    """
    means_B = mean_by_sample(logprobs_BT, batch.loss_mask)
    chosen_P, rejected_P = means_B[_get_pairs(batch, "orpo")].unbind(dim=1)
    ratio_P = _log_odds(chosen_P) - _log_odds(rejected_P)
    metrics = _compare_pairs(batch, chosen_P, rejected_P, "logprob")
    metrics["log_odds_ratio"] = _spread_to_samples(batch, ratio_P.detach())
    return LossOutput(_spread_to_samples(batch, -chosen_P - odds_ratio_coef * logsigmoid(ratio_P)), metrics)


@register_loss("simpo")
def simpo(
    batch: TokenBatch, logprobs_BT: Tensor, *, beta: float = 2.0, gamma: float = 1.0, sft_coef: float = 0.0
) -> LossOutput:
    """Returns the logistic loss of the difference of mean log-probs (SimPO, arXiv:2405.14734, eq. 6).

    l = -log sigma(beta (m_w - m_l) - gamma) - sft_coef m_w
    with m the mean log-prob of a sample's trained tokens. There is no reference.
    """
    means_B = mean_by_sample(logprobs_BT, batch.loss_mask)
    chosen_P, rejected_P = means_B[_get_pairs(batch, "simpo")].unbind(dim=1)
    loss_P = -logsigmoid(beta * (chosen_P - rejected_P) - gamma) - sft_coef * chosen_P
    return LossOutput(_spread_to_samples(batch, loss_P), _compare_pairs(batch, chosen_P, rejected_P, "logprob"))


@register_loss("kto")
def kto(batch: TokenBatch, logprobs_BT: Tensor, *, beta: float = 0.1) -> LossOutput:
    """Returns the loss of single samples that are desirable or not (KTO, arXiv:2402.01306, eq. 8).

    l = |A| (1 - sigma(beta (r - z))) if A > 0, else |A| (1 - sigma(beta (z - r)))
    with r = log p / p_ref summed over a sample's trained tokens, A its advantage (a weight, negative where the sample
    is undesirable), and z the `kl_baseline` of the whole step, without gradient.
    """
    if batch.kl_baseline is None:
        raise ConfigError(
            "kto: the samples have no `mismatched` ones, by which the KL is estimated; see add_mismatched"
        )
    ratio_B = kl_to_reference(batch, logprobs_BT, "k1").sum(dim=1)
    weight_B = mean_by_sample(batch.advantages, batch.loss_mask)
    loss_B = weight_B.abs() * torch.sigmoid(beta * weight_B.sign() * (batch.kl_baseline - ratio_B))
    metrics = {"kl_baseline": torch.tensor(batch.kl_baseline)}
    for name, is_kind_B in (("desirable_logratio", weight_B > 0), ("undesirable_logratio", weight_B < 0)):
        if is_kind_B.any():
            metrics[name] = ratio_B.detach()[is_kind_B]
    return LossOutput(loss_B, metrics)


def _log_odds(means_P: Tensor) -> Tensor:
    """Returns log P / (1 - P) of mean log-probs; log(1 - e^m) in the form that loses no digits."""
    means_P = means_P.clamp(max=MAX_MEAN_LOGPROB)
    near_zero_P = (-means_P.expm1()).log()
    far_P = torch.log1p(-means_P.clamp(max=-math.log(2)).exp())
    return means_P - torch.where(means_P > -math.log(2), near_zero_P, far_P)


def _get_pairs(batch: TokenBatch, name: str) -> Tensor:
    if batch.pairs is None or batch.pairs.numel() != len(batch.lengths):
        raise TrajectoryError(f"{name}: every sample must share its pair_id with exactly one other sample of the step")
    return batch.pairs


def _compute_margins(
    batch: TokenBatch, logprobs_BT: Tensor, length_normalized: bool, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the margin h of each pair, `[P]`, and metrics of it."""
    pairs_P2 = _get_pairs(batch, name)
    log_ratio_BT = kl_to_reference(batch, logprobs_BT, "k1")
    log_ratio_B = mean_by_sample(log_ratio_BT, batch.loss_mask) if length_normalized else log_ratio_BT.sum(dim=1)
    chosen_P, rejected_P = log_ratio_B[pairs_P2].unbind(dim=1)
    return chosen_P - rejected_P, _compare_pairs(batch, chosen_P, rejected_P, "logratio")


def _compare_pairs(batch: TokenBatch, chosen_P: Tensor, rejected_P: Tensor, what: str) -> dict[str, Tensor]:
    metrics = {
        "margin": chosen_P - rejected_P,
        f"chosen_{what}": chosen_P,
        f"rejected_{what}": rejected_P,
        "pair_accuracy": (chosen_P > rejected_P).float(),
    }
    return {key: _spread_to_samples(batch, value.detach()) for key, value in metrics.items()}


def _spread_to_samples(batch: TokenBatch, values_P: Tensor) -> Tensor:
    assert batch.pairs is not None
    empty_B = values_P.new_zeros(len(batch.lengths))
    return empty_B.index_put((batch.pairs.T.flatten(),), values_P.repeat(2))
