"""Losses: pure functions on one `TokenBatch`, found by name.

    @register_loss("my_loss")
    def my_loss(batch: TokenBatch, logprobs_BT: Tensor, *, scale: float = 1.0) -> LossOutput: ...

The learner sums: the loss of an optimizer step is sum_t w_s l_t / sum_t w_s over all trained tokens of the step,
w_s the sample's weight, so how a step is cut into micro-batches does not change it.
Shapes: B samples, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.engine.batch import TokenBatch
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.types.sample import LossSpec


@dataclass(slots=True)
class LossOutput:
    """What a loss returns.

    Attributes:
        loss: `[B, T]` loss of each token; read where `loss_mask` is True.
        metrics: Name -> `[B, T]` without gradient; the learner reports means over the trained tokens of a step.
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
    """Returns the loss that a spec names.

    Raises:
        ConfigError: No loss has that name, or it does not take these parameters.
    """
    if spec.name not in _LOSSES:
        names = ", ".join(sorted(_LOSSES))
        message = f'no loss named "{spec.name}"{did_you_mean(spec.name, _LOSSES)}'
        raise ConfigError(Problem("finetuning.algorithm", message, f"registered: {names}"))
    loss = _LOSSES[spec.name]
    parameters = inspect.signature(loss).parameters.values()
    allowed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    unknown = [name for name in spec.params if name not in allowed]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        message = f'the loss "{spec.name}" takes no "{unknown[0]}"{did_you_mean(unknown[0], allowed)}'
        raise ConfigError(Problem("finetuning.algorithm", message, f"it takes: {', '.join(allowed) or 'nothing'}"))
    return loss


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
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> LossOutput:
    """Returns the clipped policy gradient with an optional penalty for leaving the reference.

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef k3_t - entropy_coef H_t
    with r_t = p(t) / p_old(t): the surrogate of PPO (arXiv:1707.06347, eq. 7) as GRPO uses it (arXiv:2402.03300,
    eq. 3), and k3_t = p_ref / p - log(p_ref / p) - 1 (arXiv:2402.03300, eq. 4).
    Differs from the papers: the two ends of the clip are set apart; the mean is over the tokens of a step.

    Args:
        batch: The tokens, with old log-probs and advantages.
        logprobs_BT: log p of each trained token under the weights being trained.
        clip_low: The ratio counts down to 1 - clip_low.
        clip_high: The ratio counts up to 1 + clip_high.
        kl_coef: Weight of the penalty; 0 needs no reference.
        entropy_coef: Weight of the entropy bonus.

    Raises:
        ConfigError: kl_coef asks for a reference and the batch has none.
    """
    mask_BT = batch.loss_mask
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - batch.old_logprobs, 0.0)
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * batch.advantages, clipped_BT * batch.advantages)
    with torch.no_grad():
        metrics = {
            "ratio": ratio_BT.detach(),
            "clip_fraction": (clipped_BT * batch.advantages < ratio_BT * batch.advantages).float(),
            "approx_kl": ratio_BT.detach() - 1 - log_ratio_BT.detach(),
        }
    if kl_coef:
        if batch.ref_logprobs is None:
            raise ConfigError("clipped_pg: kl_coef needs ref_logprobs; let the algorithm's needs ask for them")
        ref_ratio_BT = torch.where(mask_BT, batch.ref_logprobs - logprobs_BT, 0.0)
        k3_BT = ref_ratio_BT.exp() - ref_ratio_BT - 1
        loss_BT = loss_BT + kl_coef * k3_BT
        metrics["kl_ref"] = k3_BT.detach()
    if entropy_coef and batch.entropies is not None:
        loss_BT = loss_BT - entropy_coef * batch.entropies
    return LossOutput(loss_BT, metrics)
