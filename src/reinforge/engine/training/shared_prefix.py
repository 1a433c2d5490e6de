"""Siblings share their prompt: it is computed once, with gradient, and their replies run over its keys and values.

    prompt a b c, replies d e f and g h     rows:    [a b c d e f] [a b c g h]     12 places, padded
                                            shared:  [a b c]  [d e] [g]             7 places

So is what different prompts begin with (their stem): all that is read of them stands behind it.

Suffixes attend to the keys and values of their prefix where those are (`causal.py`, on a CPU), or each row gets them by
`index_select`, whose backward pass adds up what the rows send back: the gradient is that of plain rows up to the order
of sums. What a token is predicted from is the place before it, so a sample's last token is never computed.
Shapes: B samples, G prefixes, P tokens of the longest prefix, S of the longest suffix, N trained tokens, H features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from transformers import Cache

from reinforge.engine.model.attention import NAME, SharedKeys
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.flash_attention import is_exact, runs_of
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.prompt_cache import PrefillLayer
from reinforge.engine.token_batch import Prefixes, Stems, TokenBatch
from reinforge.engine.training.collate import collate, plain_sample
from reinforge.types.sample import TrainingSample

logger = logging.getLogger(__name__)


class SuffixLayer(PrefillLayer):
    """Puts the keys and values of each row's prefix, `[G, K, P, D]`, before its own, `[B, K, S, D]`, and keeps both."""

    def __init__(self, prefix: PrefillLayer, groups_B: Tensor):
        super().__init__()
        self.prefix, self.groups_B = prefix, groups_B

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values of prefix and suffix, `[B, K, P + S, D]`."""
        own_keys, own_values = (_repeated(each, self.groups_B) for each in (self.prefix.keys, self.prefix.values))
        self.keys = torch.cat((own_keys, key_states), dim=2)
        self.values = torch.cat((own_values, value_states), dim=2)
        return self.keys, self.values


def _repeated(states: Tensor, groups_B: Tensor) -> Tensor:
    """Returns the states of each row's group, `[B, ...]`."""
    if states.device.type == "cpu" and states.requires_grad:
        return _Repeat.apply(states, groups_B)
    return states.index_select(0, groups_B)


class _Repeat(Function):
    """`index_select(0, groups)`, whose gradient is a sum over bags: a fifth of the time that torch's own way takes."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, groups_B: Tensor) -> Tensor:
        """Returns what each row's group has, `[B, ...]`."""
        ctx.shape = states.shape
        ctx.save_for_backward(groups_B)
        return states.index_select(0, groups_B)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of what the rows of each group send back."""
        (groups_B,), count = ctx.saved_tensors, ctx.shape[0]
        sizes_G = torch.bincount(groups_B, minlength=count)
        rows, order_B = gradients[0].flatten(1), groups_B.argsort()
        return F.embedding_bag(order_B, rows, sizes_G.cumsum(0) - sizes_G, mode="sum").view(ctx.shape), None


def trained_features(model: CausalModel, batch: TokenBatch, masks: AttentionMasks | None) -> Tensor:
    """Returns what each trained token is predicted from, `[N, H]`, in the order of `loss_mask.nonzero()`.

    Args:
        model: The model.
        batch: The tokens.
        masks: Makes the masks of suffixes; None: every sample is a row of its own.
    """
    rows_N, places_N = batch.loss_mask.nonzero(as_tuple=True)
    stems = batch.stems if masks is not None and masks.stems else None
    if batch.prefixes is None or masks is None:
        return _read_prompts(model, batch.token_ids[:, :-1], rows_N, places_N - 1, stems, masks)[0]
    shared = batch.prefixes
    lengths_N = shared.lengths[shared.groups][rows_N]
    is_first_N = places_N == lengths_N
    firsts_n = shared.groups[rows_N[is_first_N]]
    ends_G = torch.arange(len(shared.lengths), device=shared.lengths.device), shared.lengths - 1
    heads_GH, prefill = _read_prompts(model, shared.token_ids, *ends_G, stems, masks, keep=not is_first_N.all())
    if is_first_N.all():
        return heads_GH[firsts_n]
    rest_H = _suffix_features(
        model, batch, shared, prefill, masks, rows_N[~is_first_N], (places_N - lengths_N - 1)[~is_first_N]
    )
    order_N = torch.cat((is_first_N.nonzero(), (~is_first_N).nonzero()))[:, 0].argsort()
    return torch.cat((heads_GH[firsts_n], rest_H)).index_select(0, order_N)


def _read(
    model: CausalModel, token_ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Returns the features of some places alone, `[N, H]`."""
    places_N = rows_N * token_ids_BT.shape[1] + columns_N
    features_BTH = model.features(token_ids_BT, *args, places_N=places_N, **kwargs)
    return features_BTH.flatten(0, 1).index_select(0, places_N)


def _read_prompts(
    model: CausalModel,
    token_ids_GP: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    stems: Stems | None,
    masks: AttentionMasks | None,
    *,
    keep: bool = False,
) -> tuple[Tensor, Cache]:
    """Returns features of some places of whole rows, `[N, H]`, and the rows' keys and values where they are kept.

    Where rows have stems, these are computed once each, and all that is read is behind them.
    """
    first = Cache(layers=[PrefillLayer() for _ in range(model.num_layers)])
    if stems is None or masks is None:
        cached = {"past_key_values": first, "use_cache": True} if keep else {}
        return _read(model, token_ids_GP, rows_N, columns_N, **cached), first
    model.features(stems.token_ids, places_N=rows_N[:0], past_key_values=first, use_cache=True)
    length = stems.token_ids.shape[1]
    places_P = torch.arange(token_ids_GP.shape[1], device=token_ids_GP.device)[None]
    whole = Cache(layers=[SuffixLayer(layer, stems.groups) for layer in first.layers])
    features_NH = _read(
        model,
        token_ids_GP[:, length:],
        rows_N,
        columns_N - length,
        places_P[:, length:].expand(len(token_ids_GP), -1),
        attention_mask=masks.between(places_P[:, length:], places_P),
        past_key_values=whole,
        use_cache=True,
    )
    return features_NH, whole


def _suffix_features(
    model: CausalModel,
    batch: TokenBatch,
    shared: Prefixes,
    prefill: Cache,
    masks: AttentionMasks,
    rows_N: Tensor,
    columns_N: Tensor,
) -> Tensor:
    """Returns the features of some of the samples' tokens after their prefixes, `[N, H]`."""
    device, starts_B = batch.token_ids.device, shared.lengths[shared.groups]
    width = int((batch.lengths - starts_B).max()) - 1
    last = batch.token_ids.shape[1] - 1  # what lies behind a sample's end is computed and never read
    positions_BS = (starts_B[:, None] + torch.arange(width, device=device)).clamp(max=last)
    token_ids_BS = batch.token_ids.gather(1, positions_BS)
    read = partial(_read, model, token_ids_BS, rows_N, columns_N, positions_BS)
    if masks.joins and shared.runs is not None and masks.reach(shared.token_ids.shape[1] + width):
        keys = SharedKeys(prefill.layers, shared.runs)
        return read(attention_mask=masks.unused(), shared_keys=keys)
    places_P = torch.arange(shared.token_ids.shape[1], device=device)
    places_BP = places_P.expand(len(starts_B), -1)
    unused_BP = torch.where(places_BP < starts_B[:, None], places_BP, torch.iinfo(torch.int64).max)
    keys_BL = torch.cat((unused_BP, positions_BS), dim=1)
    layers = [SuffixLayer(layer, shared.groups) for layer in prefill.layers]
    mask = masks.between(positions_BS, keys_BL)
    return read(attention_mask=mask, past_key_values=Cache(layers=layers), use_cache=True)


@torch.no_grad()
def sharing_masks(model: CausalModel) -> AttentionMasks | None:
    """Returns what makes the masks of suffixes, or None where this family cannot share prefixes, and says so."""
    samples = [_looked_at(range(6)), _looked_at([0, 1, 2, 5, 4]), _looked_at([3, 1, 4])]
    masks = AttentionMasks(model)
    batch = collate(samples, model.device)
    assert batch.prefixes is not None
    batch.prefixes.runs = runs_of([0, 0, 1], [3, 2])  # not worth it for so few tokens, and to be tried
    reason = ""
    can_join = model.attention == NAME and model.device.type == "cpu" and is_exact()
    for masks.joins in (True, False) if can_join else (False,):
        try:
            shared, plain = trained_features(model, batch, masks), trained_features(model, batch, None)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as cause:
            reason = f"{type(cause).__name__}: {cause}"
            continue
        error, size = (shared - plain).abs().max().item(), plain.abs().max().item()
        if error <= (1e-4 if model.dtype == torch.float32 else 0.1) * max(1.0, size):
            if can_join and not masks.joins:
                logger.info("%s models repeat shared keys row by row: %s", model.config.model_type, reason)
            masks.stems = _shares_stems(model, masks)
            return masks
        reason = f"its features are {error:g} off"
    logger.warning("%s models train without shared prefixes, which is slower: %s", model.config.model_type, reason)
    return None


def _shares_stems(model: CausalModel, masks: AttentionMasks) -> bool:
    """Tries if prompts may be read behind what they begin with; else says so in the log."""
    batch = collate([_looked_at([0, 1, 2, 5]), _looked_at([0, 1, 3, 4, 2]), _looked_at([4, 1, 2, 3])], model.device)
    plain = trained_features(model, batch, None)
    both = torch.tensor([[0, 1], [4, 1]], device=model.device)
    batch.stems, masks.stems = Stems(both, torch.tensor([0, 0, 1], device=model.device)), True
    try:
        error = (trained_features(model, batch, masks) - plain).abs().max().item()
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as cause:
        reason = f"{type(cause).__name__}: {cause}"
    else:
        if error <= (1e-4 if model.dtype == torch.float32 else 0.1) * max(1.0, plain.abs().max().item()):
            return True
        reason = f"its features are {error:g} off"
    logger.info("%s models compute the beginning of every prompt: %s", model.config.model_type, reason)
    return False


def _looked_at(token_ids: Sequence[int]) -> TrainingSample:
    """Returns a sample whose prefix is its first three tokens (two, where it has no more)."""
    sample = plain_sample(token_ids)
    sample.loss_mask[: min(3, len(sample) - 1)] = False
    return sample
