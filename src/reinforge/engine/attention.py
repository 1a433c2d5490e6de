"""Attention of one new token a row over its cache, grouped heads read once; everything else is transformers' sdpa.

Registered with transformers under a name, which is its way to bring an attention function to an unmodified model.
With few keys a row, repeating the keys and values of grouped heads, as sdpa does wherever there is a mask, costs more
than the attention itself. Shapes: B rows, H heads, K heads of keys and values (H = K G), L cached tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "reinforge_grouped"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns softmax(q k^T scale + mask) v, `[B, 1, H, D]`, for one new token a row; longer queries go to sdpa.

    Args:
        module: The attention layer.
        query: `[B, H, T, D]`.
        key: `[B, K, L, D]`.
        value: `[B, K, L, D]`.
        attention_mask: Added to the scores, `[B, 1, 1, L]`.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        kwargs: What sdpa takes besides.
    """
    rows, heads, length, size = query.shape
    if length != 1 or attention_mask is None or attention_mask.dtype == torch.bool or torch.is_grad_enabled():
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = key.shape[1]
    query = query.view(rows, groups, heads // groups, size) * (size**-0.5 if scaling is None else scaling)
    scores = torch.matmul(query, key.transpose(-1, -2)).add_(attention_mask)
    return torch.matmul(scores.softmax(-1), value).view(rows, 1, heads, size), None


def use_grouped_attention(module: Any) -> None:
    """Lets a model that attends by sdpa attend by `grouped_attention`; other models are left as they are."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(NAME)
