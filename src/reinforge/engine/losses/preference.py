"""Preference losses: prefer one sample of a pair to the other.

Shapes: B samples, T tokens, P pairs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from reinforge.engine.losses.base import LossOutput, kl_to_reference, mean_by_sample, register_loss
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import TrajectoryError


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
    with h = log p / p_ref of the preferred sample minus that of the other, each summed over its trained tokens, or
    averaged if length_normalised (as in Tulu 3, arXiv:2411.15124). e is the label smoothing of conservative DPO, the
    share of pairs assumed to be mislabelled (Mitchell, "A note on DPO with noisy preferences", 2023); the last term
    is RPO's (arXiv:2404.19733, eq. 1).
    Both samples of a pair carry the loss of the pair, so means over samples are means over pairs.

    Args:
        batch: Whole pairs, with reference log-probs.
        logprobs_BT: log p of each trained token under the current weights.
        beta: Scale of h in the logistic loss.
        label_smoothing: In [0, 0.5).
        sft_coef: Weight of the preferred sample's negative log-likelihood.
        length_normalised: Average over tokens instead of summing.

    Raises:
        ConfigError: The batch has no reference log-probs.
        TrajectoryError: A sample's pair is not in the batch.
    """
    h_P, metrics = _compute_margins(batch, logprobs_BT, length_normalised, "dpo")
    loss_P = -(1 - label_smoothing) * logsigmoid(beta * h_P) - label_smoothing * logsigmoid(-beta * h_P)
    if sft_coef:
        likelihood_P = mean_by_sample(logprobs_BT, batch.loss_mask)[_get_pairs(batch, "dpo")[:, 0]]
        loss_P = loss_P - sft_coef * likelihood_P
        metrics["chosen_nll"] = _spread_to_samples(batch, -likelihood_P.detach())
    return LossOutput(_spread_to_samples(batch, loss_P), metrics)


@register_loss("ipo")
def ipo(batch: TokenBatch, logprobs_BT: Tensor, *, beta: float = 0.1, length_normalised: bool = False) -> LossOutput:
    """Returns the squared distance of the margin from its target (IPO, arXiv:2310.12036, eq. 17).

    l = (h - 1 / (2 beta))^2, h as in `dpo`; beta is the paper's tau. Unlike DPO's, the margin stops growing.

    Args:
        batch: Whole pairs, with reference log-probs.
        logprobs_BT: log p of each trained token under the current weights.
        beta: The target margin is 1 / (2 beta) nats.
        length_normalised: Average over tokens instead of summing; the target is then in nats per token.

    Raises:
        ConfigError: The batch has no reference log-probs.
        TrajectoryError: A sample's pair is not in the batch.
    """
    h_P, metrics = _compute_margins(batch, logprobs_BT, length_normalised, "ipo")
    return LossOutput(_spread_to_samples(batch, (h_P - 1 / (2 * beta)) ** 2), metrics)


def _get_pairs(batch: TokenBatch, name: str) -> Tensor:
    """Returns the batch's pairs, `[P, 2]`, after checking that every sample is in exactly one."""
    if batch.pairs is None or batch.pairs.numel() != len(batch.lengths):
        raise TrajectoryError(f"{name}: every sample must share its pair_id with exactly one other sample of the step")
    return batch.pairs


def _compute_margins(
    batch: TokenBatch, logprobs_BT: Tensor, length_normalised: bool, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the margin h of each pair, `[P]`, and metrics of it."""
    pairs_P2 = _get_pairs(batch, name)
    log_ratio_BT = kl_to_reference(batch, logprobs_BT, "k1")
    log_ratio_B = mean_by_sample(log_ratio_BT, batch.loss_mask) if length_normalised else log_ratio_BT.sum(dim=1)
    chosen_P, rejected_P = log_ratio_B[pairs_P2].unbind(dim=1)
    metrics = {
        "margin": chosen_P - rejected_P,
        "chosen_logratio": chosen_P,
        "rejected_logratio": rejected_P,
        "pair_accuracy": (chosen_P > rejected_P).float(),
    }
    return chosen_P - rejected_P, {key: _spread_to_samples(batch, value.detach()) for key, value in metrics.items()}


def _spread_to_samples(batch: TokenBatch, values_P: Tensor) -> Tensor:
    """Returns each pair's value at both of its samples, `[B]`."""
    assert batch.pairs is not None
    empty_B = values_P.new_zeros(len(batch.lengths))
    return empty_B.index_put((batch.pairs.T.flatten(),), values_P.repeat(2))
