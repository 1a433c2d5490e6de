"""What a micro-batch adds to its step: a share of the loss, log-probs, metrics, how far sampler and learner differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput
from reinforge.engine.token_batch import TokenBatch
from reinforge.errors import EngineError
from reinforge.types.sample import TrainingSample


@dataclass(slots=True)
class MetricSums:
    """The loss of a step, and sums of metrics over its trained tokens or samples."""

    loss: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor], mask_BT: Tensor) -> None:
        """Adds the values of one micro-batch: `[B, T]`, read where the mask is True, `[B]`, or one number."""
        for name, values in metrics.items():
            selected = values.detach()[mask_BT] if values.ndim == 2 else values.detach()
            self._add(name, selected.sum().item(), selected.numel())

    def merge(self, other: MetricSums) -> None:
        self.loss += other.loss
        for name, total in other.totals.items():
            self._add(name, total, other.counts[name])

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.totals.items()}

    def _add(self, name: str, total: float, count: int) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0) + count


def set_deferred_logprobs(samples: Sequence[TrainingSample], batch: TokenBatch, logprobs_BT: Tensor) -> None:
    """Sets deferred log-probs, of samples and batch, to those of the forward pass of the first step."""
    waiting = [i for i, each in enumerate(samples) if each.defers_old_logprobs and each.old_logprobs is None]
    if not waiting:
        return
    rows_BT = logprobs_BT.detach()
    batch.old_logprobs[waiting] = rows_BT[waiting]
    batch.old_logprobs_from_learner = True
    rows = rows_BT.cpu().numpy()  # one copy from the device, not one for each sample
    for i in waiting:
        samples[i].old_logprobs = rows[i, : len(samples[i])].copy()


def scale_loss(output: LossOutput, batch: TokenBatch, token_weight: float, sample_weight: float) -> Tensor:
    """Returns a micro-batch's share of the loss of its step."""
    loss = output.loss
    if loss.ndim == 0:
        return loss * batch.weights.sum() / sample_weight
    if loss.shape == batch.weights.shape:
        return (loss * batch.weights).sum() / sample_weight
    if loss.shape == batch.loss_mask.shape:
        weights_BT = batch.weights[:, None] * batch.loss_mask / token_weight
        return (torch.where(batch.loss_mask, loss, 0.0) * weights_BT).sum()
    shapes = f"[B, T] = {list(batch.loss_mask.shape)}, [B], or one number"
    raise EngineError(f"the loss has the shape {list(loss.shape)}; it must be {shapes}")


def compute_mismatch(
    batch: TokenBatch, logprobs_BT: Tensor, is_stale: Sequence[bool]
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns how far learner and sampler differ on the sampled tokens, and the mask of those tokens.

    With d = log p_learner - log p_sampler: |d|, and exp(d) - 1 - d, whose mean estimates KL(sampler, learner). Rows
    that older weights sampled are left out: there the weights differ, not the computation.
    """
    sampled_BT = batch.loss_mask & ~batch.sampling_logprobs.isnan()
    if any(is_stale):
        sampled_BT = sampled_BT & ~torch.tensor(is_stale, device=sampled_BT.device)[:, None]
    if not sampled_BT.any():
        return {}, sampled_BT
    d_BT = torch.where(sampled_BT, logprobs_BT - batch.sampling_logprobs, 0.0)
    return {"mismatch": d_BT.abs(), "mismatch_kl": d_BT.exp() - 1 - d_BT}, sampled_BT
