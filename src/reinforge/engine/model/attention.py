"""Attention with torch's own operations where transformers' sdpa does more work than needed.

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

from reinforge.engine.model.flash_attention import PrefixRun, flash_attention, is_kernel_exact

GROUPED_ATTENTION = "reinforge_grouped"
"""The name that transformers knows `grouped_attention` by."""

FEW_KEYS = 128
"""Up to this many keys two matrix products and a softmax are 1.2 to 2 x as fast as the flash kernel with a mask."""

FEW_SCORES = 2**22
"""Up to this many scores, too: the backward pass keeps them (16 MiB a layer), where the kernel recomputes them."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys and values of shared prefixes, passed through a model to `grouped_attention` as `shared_keys`.

    Attributes:
        layers: The prefixes' keys and values, `[G, K, P, D]` in each layer.
        runs: Which rows have which prefix.
    """

    layers: Sequence[CacheLayerMixin]
    runs: Sequence[PrefixRun]


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
        kwargs: Further arguments of sdpa.
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
        query: `[B, H, D]`.
        key: `[B, K, L, D]`; the heads of a group share it without a copy.
        value: `[B, K, L, D]`.
        mask: Added to the scores, `[B, 1, 1, L]`.
        scale: Factor of the scores.
    """
    rows, heads, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size) * scale
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(mask)
    return torch.matmul(scores.softmax(-1), value).view(rows, heads, size)


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
