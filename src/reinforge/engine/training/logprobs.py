"""Log-probs of given tokens by a forward pass, with or without gradient; logits are never held whole (`lm_head.py`).

Shapes: B samples, T tokens, N trained tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.fused_layers import MULTIPLY
from reinforge.engine.model.heads import ChunkedLMHead, ValueHead, scatter_to_tokens, split_tokens
from reinforge.engine.token_batch import BatchSupports, TokenBatch
from reinforge.engine.training.collate import collate
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.shared_prefix import trained_features
from reinforge.types.sample import FloatArray, TrainingSample


def token_logprobs(
    model: CausalModel,
    batch: TokenBatch,
    *,
    masks: AttentionMasks | None = None,
    entropy_grad: bool = False,
    critic: ValueHead | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log p of each trained token and the entropy of its distribution, `[B, T]` each, 0 elsewhere.

    log p(t) = z_t - log sum_v exp z_v and H = log sum_v exp z_v - sum_v p_v z_v, with z the logits divided by the
    token's temperature (0 counts as 1, as in the sampler) and v over the tokens that it was sampled from (top-p, top-k,
    min-p, a grammar, banned tokens), or the whole vocabulary. They are the same under any weights ("keep sampling
    mask" of DeepSeek-V3.2, arXiv:2512.02556): otherwise the ratio of two policies would compare distributions over
    different tokens. Only trained positions go through the output layer, in chunks whose logits are recomputed in the
    backward pass.

    Args:
        masks: Attention masks for shared prefixes; None: each sample is computed whole.
    """
    rows_N, places_N = batch.loss_mask.nonzero(as_tuple=True)
    features_NH = trained_features(model, batch, masks)
    if critic is not None:
        batch.values = scatter_to_tokens(batch, critic(features_NH))
    tokens_BT = batch.token_ids if batch.targets is None else batch.targets
    targets_N, temperatures_N = tokens_BT[rows_N, places_N], batch.temperatures[rows_N, places_N]
    scales_N = torch.where(temperatures_N == 0, 1.0, temperatures_N)
    if batch.supports is None and model.has_plain_head:
        multiply = vars(model.head).get(MULTIPLY, linear)
        outputs = ChunkedLMHead.apply(features_NH, model.head.weight, targets_N, scales_N, entropy_grad, multiply)
    else:
        outputs = _compute_from_logits(model, batch, features_NH, targets_N, scales_N, entropy_grad)
    empty = outputs[0].new_zeros(batch.token_ids.shape)
    logprobs_BT, entropies_BT = (empty.index_put((rows_N, places_N), values_N) for values_N in outputs)
    return logprobs_BT, entropies_BT


def _compute_from_logits(
    model: CausalModel, batch: TokenBatch, features_NH: Tensor, targets_N: Tensor, scales_N: Tensor, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Returns log-probs and entropies from the model's own logits: for other output layers and restricted supports."""

    def head(
        features_nH: Tensor, targets_n: Tensor, scales_n: Tensor, supports: BatchSupports | None
    ) -> tuple[Tensor, Tensor]:
        logits_nV = factors_nV = model.logits(features_nH) / scales_n[:, None]
        if supports is not None:
            removed_nV = _mask_removed(supports, logits_nV.shape[-1])
            logits_nV = logits_nV.masked_fill(removed_nV, -torch.inf)
            factors_nV = factors_nV.masked_fill(removed_nV, 0.0)  # 0 * -inf would be NaN
        sums_n = logits_nV.logsumexp(dim=-1)
        logprobs_n = logits_nV.gather(1, targets_n[:, None])[:, 0] - sums_n
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            entropies_n = sums_n - ((logits_nV - sums_n[:, None]).exp() * factors_nV).sum(dim=-1)
        return logprobs_n, entropies_n

    parts = []
    slices = split_tokens(len(targets_N), model.vocab_size)
    for n in slices:
        part = (features_NH[n], targets_N[n], scales_N[n], _get_supports(batch, n.start, n.stop))
        recompute = torch.is_grad_enabled() and len(slices) > 1
        parts.append(checkpoint(head, *part, use_reentrant=False) if recompute else head(*part))
    if not parts:
        none = features_NH.new_zeros(0, dtype=torch.float32)
        return none, none
    logprobs_N, entropies_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs_N, entropies_N


def _get_supports(batch: TokenBatch, start: int, stop: int) -> BatchSupports | None:
    """Returns the supports of some trained tokens; None where all of them use the whole vocabulary."""
    if batch.supports is None:
        return None
    ends, indices = batch.supports.ends[start : stop + 1], batch.supports.mask_indices[start:stop]
    if ends[0] == ends[-1] and (indices < 0).all():
        return None
    kept = batch.supports.token_ids[ends[0] : ends[-1]]
    return BatchSupports(ends - ends[0], kept, indices, batch.supports.masks)


def _mask_removed(supports: BatchSupports, vocab_size: int) -> Tensor:
    """Returns a mask of the tokens that could not be sampled, `[n, V]`.

    Example: kept [1, 0, 2], ends [0, 1, 1, 3], no masks, V 3 -> [[T, F, T], [F, F, F], [F, T, F]]
    Example: ends [0, 0, 0], mask_indices [0, -1], masks [[0b101]], V 3 -> [[F, T, F], [F, F, F]]
    """
    kept_m = supports.token_ids
    counts_n = torch.from_numpy(np.diff(supports.ends)).to(kept_m.device)
    removed_nV = (counts_n > 0)[:, None].repeat(1, vocab_size)
    rows_m = torch.arange(len(counts_n), device=kept_m.device).repeat_interleave(counts_n, output_size=len(kept_m))
    removed_nV.index_put_((rows_m, kept_m), removed_nV.new_zeros(()))
    has_mask = supports.mask_indices >= 0
    if has_mask.any():
        rows, indices = (
            torch.from_numpy(array).to(kept_m.device)
            for array in (np.flatnonzero(has_mask), supports.mask_indices[has_mask])
        )
        used, places = indices.unique(return_inverse=True)
        shifts = torch.arange(8, dtype=torch.uint8, device=kept_m.device)
        removed = ((supports.masks[used][:, :, None] >> shifts) & 1 == 0).flatten(1)[:, :vocab_size]
        missing = vocab_size - removed.shape[1]  # another model may have further tokens, such as a teacher's padding
        removed_nV[rows] = pad(removed, (0, missing), value=True)[places]
    return removed_nV


@torch.no_grad()
def sample_logprobs(
    model: CausalModel,
    samples: Sequence[TrainingSample],
    max_tokens: int,
    masks: AttentionMasks | None = None,
    take_turns: Callable[[], None] | None = None,
) -> list[FloatArray]:
    """Returns log p of each sample's trained tokens, `[T]` each, 0 elsewhere.

    Args:
        max_tokens: Maximum tokens of a micro-batch, padding included.
        masks: Attention masks for shared prefixes; None: each sample is computed whole.
        take_turns: Called after each micro-batch; None: nothing is.
    """
    logprobs: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for indices in make_micro_batches(
        samples, max_tokens, share=masks is not None, share_stems=masks is not None and masks.shares_stems
    ):
        batch = collate([samples[i] for i in indices], model.device)
        rows = token_logprobs(model, batch, masks=masks)[0].cpu().numpy()
        for i, row in zip(indices, rows, strict=True):
            logprobs[i] = row[: len(samples[i])].copy()
        if take_turns is not None:
            take_turns()
    return logprobs
