"""Computes a prompt that siblings share once, with gradient; their replies attend to its keys and values.

    prompt a b c, replies d e f and g h     rows:    [a b c d e f] [a b c g h]     12 positions, padded
                                            shared:  [a b c]  [d e] [g]             7 positions

The common beginning of different prompts (their stem) is computed once in the same way.

On a CPU, suffixes attend to the keys and values of their prefix in place (`flash_attention.py`). Elsewhere each row
gets a copy by `index_select`, whose backward pass sums the rows' gradients. Either way the gradient is that of plain
rows, up to the order of summation. A token is predicted from the position before it, so a sample's last token is never
computed.

In models with states (`model_cache.py`) a prefix ends in a state, from which each suffix continues. Prefixes of
different lengths are padded on the left, so that all states are those after the last token.

Shapes: B samples, G prefixes, P tokens of the longest prefix, S of the longest suffix, N trained tokens, H features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from transformers.cache_utils import DummyLayer

from reinforge.engine.model.attention import GROUPED_ATTENTION, AttentionMasks, SharedKeys
from reinforge.engine.model.causal_model import TRIAL_FAILURES, CausalModel
from reinforge.engine.model.flash_attention import find_prefix_runs, is_kernel_exact
from reinforge.engine.model.model_cache import LeftPadding, ModelCache, PrefillCacheLayer, make_prefill_cache
from reinforge.engine.token_batch import Prefixes, Stems, TokenBatch
from reinforge.engine.training.collate import collate, make_plain_sample
from reinforge.types.sample import TrainingSample

logger = logging.getLogger(__name__)


class SuffixLayer(PrefillCacheLayer):
    """Prepends the keys and values of each row's prefix, `[G, K, P, D]`, to the row's own, `[B, K, S, D]`."""

    def __init__(self, prefix: PrefillCacheLayer, groups_B: Tensor):
        super().__init__()
        self.prefix, self.groups_B = prefix, groups_B

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values of prefix and suffix, `[B, K, P + S, D]`."""
        prefix_keys, prefix_values = (_repeat(each, self.groups_B) for each in (self.prefix.keys, self.prefix.values))
        self.keys = torch.cat((prefix_keys, key_states), dim=2)
        self.values = torch.cat((prefix_values, value_states), dim=2)
        return self.keys, self.values


def _repeat(states: Tensor, groups_B: Tensor) -> Tensor:
    if states.device.type == "cpu" and states.requires_grad:
        return _Repeat.apply(states, groups_B)
    return states.index_select(0, groups_B)


class _Repeat(Function):
    """`index_select(0, groups)` with a backward pass that takes a fifth of the time of torch's own."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, groups_B: Tensor) -> Tensor:
        ctx.shape = states.shape
        ctx.save_for_backward(groups_B)
        return states.index_select(0, groups_B)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients of each group's rows."""
        (groups_B,), count = ctx.saved_tensors, ctx.shape[0]
        sizes_G = torch.bincount(groups_B, minlength=count)
        rows, order_B = gradients[0].flatten(1), groups_B.argsort()
        return F.embedding_bag(order_B, rows, sizes_G.cumsum(0) - sizes_G, mode="sum").view(ctx.shape), None


def trained_features(model: CausalModel, batch: TokenBatch, masks: AttentionMasks | None) -> Tensor:
    """Returns the features that predict each trained token, `[N, H]`, in the order of `loss_mask.nonzero()`.

    Args:
        masks: Attention masks for suffixes; None: every sample is a separate row.
    """
    rows_N, places_N = batch.loss_mask.nonzero(as_tuple=True)
    stems = batch.stems if masks is not None and masks.shares_stems else None
    if batch.prefixes is None or masks is None:
        return _compute_prompts(model, batch.token_ids[:, :-1], rows_N, places_N - 1, stems, masks)[0]
    shared = batch.prefixes
    lengths_N = shared.lengths[shared.groups][rows_N]
    is_first_N = places_N == lengths_N
    firsts_n = shared.groups[rows_N[is_first_N]]
    last_GH, prefill = _compute_prefixes(model, shared, stems, masks, keep=not is_first_N.all())
    if is_first_N.all():
        return last_GH[firsts_n]
    rest_H = _compute_suffixes(
        model, batch, shared, prefill, masks, rows_N[~is_first_N], (places_N - lengths_N - 1)[~is_first_N]
    )
    order_N = torch.cat((is_first_N.nonzero(), (~is_first_N).nonzero()))[:, 0].argsort()
    return torch.cat((last_GH[firsts_n], rest_H)).index_select(0, order_N)


def _compute_features(
    model: CausalModel, token_ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    places_N = rows_N * token_ids_BT.shape[1] + columns_N
    features_BTH = model.features(token_ids_BT, *args, indices_N=places_N, **kwargs)
    return features_BTH.flatten(0, 1).index_select(0, places_N)


@dataclass(slots=True)
class _PrefixPass:
    """The prefixes of a batch: keys, values and states, and each key's position, the greatest integer if unused."""

    cache: ModelCache
    key_positions_GP: Tensor


def _compute_prefixes(
    model: CausalModel, shared: Prefixes, stems: Stems | None, masks: AttentionMasks, *, keep: bool
) -> tuple[Tensor, _PrefixPass]:
    """Returns the features of each prefix's last token, `[G, H]`, and the prefixes' cache if `keep`."""
    lengths_G, width = shared.lengths, shared.token_ids.shape[1]
    rows_G = torch.arange(len(lengths_G), device=lengths_G.device)
    if keep and model.has_states and int(lengths_G.min()) < width:
        padding = LeftPadding.from_lengths(lengths_G, width, model.dtype)
        cache = make_prefill_cache(model.layer_kinds)
        last_GH = _compute_features(
            model,
            shared.token_ids.gather(1, padding.positions),
            rows_G,
            torch.full_like(rows_G, width - 1),
            padding.positions,
            attention_mask=masks.build_mask(padding.positions, padding.key_positions, padding.is_token),
            past_key_values=cache,
            use_cache=True,
        )
        return last_GH, _PrefixPass(cache, padding.key_positions)
    last_GH, cache = _compute_prompts(model, shared.token_ids, rows_G, lengths_G - 1, stems, masks, keep=keep)
    places_GP = torch.arange(width, device=lengths_G.device).expand(len(lengths_G), -1)
    unused = torch.iinfo(torch.int64).max
    return last_GH, _PrefixPass(cache, torch.where(places_GP < lengths_G[:, None], places_GP, unused))


def _compute_prompts(
    model: CausalModel,
    token_ids_GP: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    stems: Stems | None,
    masks: AttentionMasks | None,
    *,
    keep: bool = False,
) -> tuple[Tensor, ModelCache]:
    """Returns features of some positions of whole rows, `[N, H]`, and the rows' cache if `keep`.

    Stems are computed once each; all requested positions come after them.
    """
    cache = make_prefill_cache(model.layer_kinds)
    if stems is None or masks is None:
        cached = {"past_key_values": cache, "use_cache": True} if keep else {}
        return _compute_features(model, token_ids_GP, rows_N, columns_N, **cached), cache
    model.features(stems.token_ids, indices_N=rows_N[:0], past_key_values=cache, use_cache=True)
    length = stems.token_ids.shape[1]
    places_P = torch.arange(token_ids_GP.shape[1], device=token_ids_GP.device)[None]
    whole = _continue(cache, stems.groups)
    features_NH = _compute_features(
        model,
        token_ids_GP[:, length:],
        rows_N,
        columns_N - length,
        places_P[:, length:].expand(len(token_ids_GP), -1),
        attention_mask=masks.build_mask(places_P[:, length:], places_P),
        past_key_values=whole,
        use_cache=True,
    )
    return features_NH, whole


def _compute_suffixes(
    model: CausalModel,
    batch: TokenBatch,
    shared: Prefixes,
    prefill: _PrefixPass,
    masks: AttentionMasks,
    rows_N: Tensor,
    columns_N: Tensor,
) -> Tensor:
    """Returns the features of some of the samples' tokens after their prefixes, `[N, H]`."""
    device, starts_B = batch.token_ids.device, shared.lengths[shared.groups]
    width = int((batch.lengths - starts_B).max()) - 1
    if model.has_states:
        width = max(2, width)  # modules compute a single token with states as the sampler does: in place
    last = batch.token_ids.shape[1] - 1  # positions after a sample's end are computed, but never read
    positions_BS = (starts_B[:, None] + torch.arange(width, device=device)).clamp(max=last)
    token_ids_BS = batch.token_ids.gather(1, positions_BS)
    compute = partial(_compute_features, model, token_ids_BS, rows_N, columns_N, positions_BS)
    if masks.shares_in_place and shared.runs is not None and masks.sees_all(shared.token_ids.shape[1] + width):
        keys = SharedKeys(prefill.cache.layers, shared.runs)
        return compute(attention_mask=masks.build_dummy_mask(), shared_keys=keys)
    keys_BL = torch.cat((prefill.key_positions_GP.index_select(0, shared.groups), positions_BS), dim=1)
    mask = masks.build_mask(positions_BS, keys_BL)
    return compute(attention_mask=mask, past_key_values=_continue(prefill.cache, shared.groups), use_cache=True)


def _continue(cache: ModelCache, groups_B: Tensor) -> ModelCache:
    layers = [
        SuffixLayer(layer, groups_B) if isinstance(layer, PrefillCacheLayer) else DummyLayer() for layer in cache.layers
    ]
    return ModelCache(layers, [states if states is None else states.select(groups_B) for states in cache.states])


@torch.no_grad()
def make_sharing_masks(model: CausalModel) -> AttentionMasks | None:
    """Returns the attention masks for suffixes, or None if a trial shows that this model cannot share prefixes."""
    samples = [_make_probe(range(6)), _make_probe([0, 1, 2, 5, 4]), _make_probe([3, 1, 4])]
    masks = AttentionMasks(model)
    batch = collate(samples, model.device)
    assert batch.prefixes is not None
    batch.prefixes.runs = find_prefix_runs([0, 0, 1], [3, 2])  # `collate` makes none for so few tokens
    reason = ""
    can_join = (
        not model.has_states
        and model.attn_implementation == GROUPED_ATTENTION
        and model.device.type == "cpu"
        and is_kernel_exact()
    )
    for masks.shares_in_place in (True, False) if can_join else (False,):
        try:
            shared, plain = trained_features(model, batch, masks), trained_features(model, batch, None)
            if model.has_states:
                _compute_gradients(model, batch, masks)
        except TRIAL_FAILURES as cause:
            reason = f"{type(cause).__name__}: {cause}"
            continue
        error, size = (shared - plain).abs().max().item(), plain.abs().max().item()
        if error <= (1e-4 if model.dtype == torch.float32 else 0.1) * max(1.0, size):
            if can_join and not masks.shares_in_place:
                logger.info(
                    "%s: copying the KV cache of shared prefixes to each row: %s", model.config.model_type, reason
                )
            masks.shares_stems = not model.has_states and _can_share_stems(model, masks)
            return masks
        reason = f"features differ by {error:g}"
    logger.warning("%s: training without shared prefixes (slower): %s", model.config.model_type, reason)
    return None


def _compute_gradients(model: CausalModel, batch: TokenBatch, masks: AttentionMasks) -> None:
    """Runs a backward pass through shared states, which fails where a module overwrites them."""
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        total = trained_features(model, batch, masks).float().sum()
        torch.autograd.grad(total, min(parameters, key=torch.Tensor.numel), allow_unused=True)


def _can_share_stems(model: CausalModel, masks: AttentionMasks) -> bool:
    """Returns True if a trial with shared stems gives the same features; else logs why not."""
    batch = collate([_make_probe([0, 1, 2, 5]), _make_probe([0, 1, 3, 4, 2]), _make_probe([4, 1, 2, 3])], model.device)
    plain = trained_features(model, batch, None)
    both = torch.tensor([[0, 1], [4, 1]], device=model.device)
    batch.stems, masks.shares_stems = Stems(both, torch.tensor([0, 0, 1], device=model.device)), True
    try:
        error = (trained_features(model, batch, masks) - plain).abs().max().item()
    except TRIAL_FAILURES as cause:
        reason = f"{type(cause).__name__}: {cause}"
    else:
        if error <= (1e-4 if model.dtype == torch.float32 else 0.1) * max(1.0, plain.abs().max().item()):
            return True
        reason = f"features differ by {error:g}"
    logger.info("%s: training without shared stems (slower): %s", model.config.model_type, reason)
    return False


def _make_probe(token_ids: Sequence[int]) -> TrainingSample:
    sample = make_plain_sample(token_ids)
    sample.loss_mask[: min(3, len(sample) - 1)] = False
    return sample
