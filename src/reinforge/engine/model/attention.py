"""Attention with torch's own operations where transformers' sdpa does more work than needed, and the masks it takes.

It is registered with transformers under a name, which is how an unmodified model gets another attention function. sdpa
repeats the keys and values of grouped heads wherever there is a mask, which costs more than the attention over a few
keys; on a CPU it also multiplies every query with later keys (`flash_attention.py`).

Shapes: B rows, H heads, K heads of keys and values (H = K G), T new tokens of a row, L cached tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.flash_attention import PrefixRun, flash_attention, is_kernel_exact
from reinforge.errors import EngineError

GROUPED_ATTENTION = "reinforge_grouped"  # the name that transformers knows `grouped_attention` by

FEW_KEYS = 128
"""Up to this many keys two matrix products and a softmax are 1.2 to 2 x as fast as the flash kernel with a mask."""

FEW_SCORES = 2**22
"""Up to this many scores, too: the backward pass keeps them (16 MiB a layer), where the kernel recomputes them."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys and values of shared prefixes, passed through a model to `grouped_attention` as `shared_keys`."""

    layers: Sequence[CacheLayerMixin]  # the prefixes' keys and values, `[G, K, P, D]` in each layer
    runs: Sequence[PrefixRun]  # which rows have which prefix


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    shared_keys: SharedKeys | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns softmax(q k^T scale + mask) v, `[B, T, H, D]`.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, K, L, D]`.
        value: `[B, K, L, D]`.
        attention_mask: Added to the scores, `[B, 1, T, L]`; None: causal.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        shared_keys: Prefixes that all tokens of a row see before their own keys; the mask is then ignored.
    """
    rows, heads, length, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    if shared_keys is not None:
        prefix = shared_keys.layers[module.layer_idx]
        return flash_attention(query, key, value, scale, (prefix.keys, prefix.values), shared_keys.runs), None
    equal_sizes = value.shape[-1] == size  # not in latent attention (DeepSeek)
    is_whole = attention_mask is None and key.shape[2] == length and equal_sizes
    if is_whole and _is_causal(module, kwargs) and query.device.type == "cpu":
        return flash_attention(query, key, value, scale), None
    if attention_mask is None or attention_mask.dtype == torch.bool or not (equal_sizes and _is_plain(kwargs)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if length == 1 and not torch.is_grad_enabled():
        return decode_attention(query.view(rows, heads, size), key, value, attention_mask, scale)[:, None], None
    few = key.shape[2] <= FEW_KEYS and rows * heads * length * key.shape[2] <= FEW_SCORES
    if not few or query.device.type != "cpu" or query.dtype != torch.float32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return few_keys_attention(query, key, value, attention_mask, scale), None


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns the attention of one new token per row, `[B, H, D]`; compiled by TorchScript, too.

    Args:
        key: `[B, K, L, D]`; the heads of a group share it without a copy.
        value: `[B, K, L, D]`.
        mask: Added to the scores, `[B, 1, 1, L]`.
    """
    rows, heads, size = query.shape
    if rows == 1 and not query.is_cuda:  # a CPU multiplies few rows in bfloat16 more slowly than it converts them
        key, value, mask = key.float(), value.float(), mask.float()
    grouped = query.to(key.dtype).reshape(rows, key.shape[1], heads // key.shape[1], size) * scale
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(mask)
    return torch.matmul(scores.softmax(-1), value).view(rows, heads, size).to(query.dtype)


def few_keys_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns `grouped_attention` by two matrix products, `[B, T, H, D]`; the arguments have the same shapes."""
    rows, heads, length, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    grouped = (query * scale).reshape(rows, groups, -1, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(rows, groups, -1, length, keys).add_(mask[:, :, None])
    output = torch.matmul(scores.softmax(-1).view(rows, groups, -1, keys), value)
    return output.view(rows, heads, length, size).transpose(1, 2)


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Returns True if each query sees its own and earlier keys, and nothing else changes the scores."""
    return _is_plain(kwargs) and kwargs.get("is_causal") is not False and module.is_causal and is_kernel_exact()


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Returns True if nothing but a mask changes the scores."""
    return kwargs.get("position_bias") is None and not (kwargs.get("softcap") or kwargs.get("dropout"))


def use_grouped_attention(module: Any) -> None:
    """Replaces sdpa by `grouped_attention` in a model that uses sdpa; other models stay unchanged."""
    AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
    AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
    if module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(GROUPED_ATTENTION)


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION_OF = {"hybrid": FULL, "hybrid_sliding": SLIDING}
"""Kind of attention in layers that have both attention and states."""

Masks = Tensor | dict[str, Tensor | None] | None
"""What a model takes as `attention_mask`: one mask, one for each kind of layer, or none."""


class AttentionMasks:
    """Builds the masks of one model.

    Attributes:
        shares_in_place: True if suffixes attend to their shared prefix without a copy, and without a mask wherever no
            window ends; set after a trial run of this model.
        shares_stems: True if the common start of different prompts is shared, too; set the same way.
    """

    shares_in_place = False
    shares_stems = False

    def __init__(self, model: CausalModel):
        if model.attn_implementation not in (GROUPED_ATTENTION, "sdpa", "eager"):
            raise EngineError(
                f"the sampler supports the attention functions sdpa and eager, not {model.attn_implementation!r}"
            )
        self.has_states = model.has_states
        self.kinds = {ATTENTION_OF.get(kind.name, kind.name) for kind in model.layer_kinds if kind.has_keys}
        self.window: int | None = getattr(model.config, "sliding_window", None) if SLIDING in self.kinds else None
        self.chunk: int | None = getattr(model.config, "attention_chunk_size", None) if CHUNKED in self.kinds else None
        self.zero = torch.zeros((), dtype=model.dtype, device=model.device)

    def sees_all(self, length: int) -> bool:
        return (self.window is None or length <= self.window) and (self.chunk is None or length <= self.chunk)

    def build_dummy_mask(self) -> Masks:
        """Returns a mask that is never read, `[1, 1, 1, 1]`; it keeps transformers from building one."""
        first = torch.zeros(1, 1, dtype=torch.long, device=self.zero.device)
        return self.build_mask(first, first)

    def build_step_mask(self, positions_B: Tensor, length: int) -> Masks:
        """Returns the mask of one new token per row over `length` tokens of its cache, `[B, 1, 1, L]`."""
        places_L = torch.arange(length, device=positions_B.device)
        return self.build_mask(positions_B[:, None], places_L[None])

    def build_mask(self, queries_BS: Tensor, keys_BL: Tensor, is_token_BS: Tensor | None = None) -> Masks:
        """Returns 0 where a query sees a key and the dtype's least number elsewhere, `[B, 1, S, L]`.

        Layers with states get `is_token_BS` instead, and nothing if it is None.

        Args:
            keys_BL: Position of each key; no query sees a key at a later position.
            is_token_BS: 0 where a query is padding, else 1; None: there is no padding.
        """
        masks: dict[str, Tensor | None] = {}
        if FULL in self.kinds:
            masks[FULL] = self._build(queries_BS, keys_BL, None)
        if SLIDING in self.kinds:
            masks[SLIDING] = self._build(queries_BS, keys_BL, self.window)
        if CHUNKED in self.kinds:
            mask = self._build(queries_BS, keys_BL, None)
            masks[CHUNKED] = mask if self.chunk is None else mask + self._build_chunks(queries_BS, keys_BL, self.chunk)
        if self.has_states:
            return {**masks, "linear_attention": is_token_BS, "conv": is_token_BS} if masks else is_token_BS
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _build(self, queries_BS: Tensor, keys_BL: Tensor, window: int | None) -> Tensor:
        return build_additive_mask(queries_BS, keys_BL, window, self.zero, torch.finfo(self.zero.dtype).min)

    def _build_chunks(self, queries_BS: Tensor, keys_BL: Tensor, size: int) -> Tensor:
        same_BSL = queries_BS[:, :, None] // size == keys_BL[:, None, :] // size
        return torch.where(same_BSL, self.zero, torch.finfo(self.zero.dtype).min)[:, None]


def build_additive_mask(queries_BS: Tensor, keys_BL: Tensor, window: int | None, zero: Tensor, least: float) -> Tensor:
    """Returns 0 where a query sees a key and the least number elsewhere, `[B, 1, S, L]`; compiled by TorchScript, too.

    Args:
        window: Number of tokens that a query sees, itself included; None: all earlier ones.
        zero: 0 with the mask's dtype and device.
    """
    queries_BS1, keys_B1L = queries_BS[:, :, None], keys_BL[:, None, :]
    seen_BSL = keys_B1L <= queries_BS1
    if window is not None:
        seen_BSL = seen_BSL & (keys_B1L > queries_BS1 - window)
    return torch.where(seen_BSL, zero, least)[:, None]
