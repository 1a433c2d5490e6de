"""Explicit attention masks, one for each kind of layer where a model mixes full and sliding attention.

Masks are added to the scores, which every attention function accepts; sdpa would convert a boolean mask into this form
in each layer again.

Shapes: B rows, S queries, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.engine.model.attention import GROUPED_ATTENTION
from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import EngineError

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

    Raises:
        EngineError: The model's kind of attention takes no explicit mask.
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
