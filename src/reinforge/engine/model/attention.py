"""Attention by torch's own means where transformers' sdpa costs more than it has to.

Registered with transformers under a name, which is its way to bring an attention function to an unmodified model.
sdpa repeats the keys and values of grouped heads wherever there is a mask, which costs more than the attention of a
few keys; on a CPU it multiplies every query with later keys too (`causal.py`).
Shapes: B rows, H heads, K heads of keys and values (H = K G), T new tokens of a row, L cached ones, D head size.
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

from reinforge.engine.model.flash_attention import Run, causal_attention, is_exact

NAME = "reinforge_grouped"

FEW_KEYS = 128
"""Keys up to which two products and a softmax are faster than the flash kernel with a mask: 1.2 to 2 x."""

FEW_SCORES = 2**22
"""Scores up to which they are: the backward pass keeps them, where the kernel computes them again; 16 MiB a layer."""


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Keys and values of prefixes that rows share, handed through a model to `grouped_attention` as `shared_keys`.

    Attributes:
        layers: The prefixes' keys and values, `[G, K, P, D]`.
        runs: Which rows have which prefix.
    """

    layers: Sequence[CacheLayerMixin]
    runs: Sequence[Run]


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
        module: The attention layer.
        query: `[B, H, T, D]`.
        key: `[B, K, L, D]`.
        value: `[B, K, L, D]`.
        attention_mask: Added to the scores, `[B, 1, T, L]`; None: causal.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        shared_keys: What all tokens of a row see before their own keys; there is no mask then.
        kwargs: What sdpa takes besides.
    """
    rows, heads, length, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    if shared_keys is not None:
        before = shared_keys.layers[module.layer_idx]
        return causal_attention(query, key, value, scale, (before.keys, before.values), shared_keys.runs), None
    if attention_mask is None and key.shape[2] == length and _is_causal(module, kwargs) and query.device.type == "cpu":
        return causal_attention(query, key, value, scale), None
    if attention_mask is None or attention_mask.dtype == torch.bool or not _is_plain(kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if length == 1 and not torch.is_grad_enabled():
        return step_attention(query.view(rows, heads, size), key, value, attention_mask, scale)[:, None], None
    few = key.shape[2] <= FEW_KEYS and rows * heads * length * key.shape[2] <= FEW_SCORES
    if not few or query.device.type != "cpu" or query.dtype != torch.float32:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return few_keys_attention(query, key, value, attention_mask, scale), None


def step_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns what one new token of each row sees, `[B, H, D]`; TorchScript runs it too.

    Args:
        query: `[B, H, D]`.
        key: `[B, K, L, D]`, which every head of a group looks at where they are.
        value: `[B, K, L, D]`.
        mask: Added to the scores, `[B, 1, 1, L]`.
        scale: Factor of the scores.
    """
    rows, heads, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size) * scale
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(mask)
    return torch.matmul(scores.softmax(-1), value).view(rows, heads, size)


def few_keys_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Returns `grouped_attention` by two products, `[B, T, H, D]`; arguments as there."""
    rows, heads, length, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    grouped = (query * scale).reshape(rows, groups, -1, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(rows, groups, -1, length, keys).add_(mask[:, :, None])
    seen = torch.matmul(scores.softmax(-1).view(rows, groups, -1, keys), value)
    return seen.view(rows, heads, length, size).transpose(1, 2)


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Returns True if a query sees its own and earlier keys, and nothing else is asked of the scores."""
    return _is_plain(kwargs) and kwargs.get("is_causal") is not False and module.is_causal and is_exact()


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Returns True if nothing but a mask is asked of the scores."""
    return kwargs.get("position_bias") is None and not (kwargs.get("softcap") or kwargs.get("dropout"))


def use_grouped_attention(module: Any) -> None:
    """Lets a model that attends by sdpa attend by `grouped_attention`; other models are left as they are."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(NAME)
