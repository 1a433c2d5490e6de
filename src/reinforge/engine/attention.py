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

from reinforge.engine.causal import Run, causal_attention, is_exact

NAME = "reinforge_grouped"


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
    if length != 1 or attention_mask is None or attention_mask.dtype == torch.bool or torch.is_grad_enabled():
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return step_attention(query.view(rows, heads, size), key, value, attention_mask, scale)[:, None], None


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


def _is_causal(module: Any, kwargs: dict[str, Any]) -> bool:
    """Returns True if a query sees its own and earlier keys, and nothing else is asked of the scores."""
    asked = [kwargs.get("is_causal") is False, kwargs.get("softcap"), kwargs.get("dropout"), not module.is_causal]
    return kwargs.get("position_bias") is None and not any(asked) and is_exact()


def use_grouped_attention(module: Any) -> None:
    """Lets a model that attends by sdpa attend by `grouped_attention`; other models are left as they are."""
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if module.config._attn_implementation == "sdpa":
        module.set_attn_implementation(NAME)
