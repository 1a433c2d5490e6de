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
        self.kinds = set(getattr(model.config, "layer_types", None) or [])
        unknown = self.kinds - {"full_attention", "sliding_attention"}
        if unknown:
            raise EngineError(f"the sampler cannot cache layers of type {', '.join(sorted(unknown))}")
        slides = self.kinds != {"full_attention"}
        self.window: int | None = getattr(model.config, "sliding_window", None) if slides else None
        self.zero = torch.zeros((), dtype=model.dtype, device=model.device)

    def sees_all(self, length: int) -> bool:
        """Returns True if every token of a row of this length sees all earlier tokens."""
        return self.window is None or length <= self.window

    def build_dummy_mask(self) -> Tensor | dict[str, Tensor]:
        """Returns a mask that is never read, `[1, 1, 1, 1]`; it keeps transformers from building one."""
        first = torch.zeros(1, 1, dtype=torch.long, device=self.zero.device)
        return self.build_mask(first, first)

    def build_step_mask(self, positions_B: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Returns the mask of one new token per row over `length` tokens of its cache, `[B, 1, 1, L]`."""
        places_L = torch.arange(length, device=positions_B.device)
        return self.build_mask(positions_B[:, None], places_L[None])

    def build_mask(self, queries_BS: Tensor, keys_BL: Tensor) -> Tensor | dict[str, Tensor]:
        """Returns 0 where a query sees a key and the dtype's least number elsewhere, `[B, 1, S, L]`.

        Args:
            queries_BS: Position of each query.
            keys_BL: Position of each key; no query sees a key at a later position.
        """
        full = self._build(queries_BS, keys_BL, None)
        if self.window is None:
            return full
        sliding = self._build(queries_BS, keys_BL, self.window)
        return {"full_attention": full, "sliding_attention": sliding} if len(self.kinds) > 1 else sliding

    def _build(self, queries_BS: Tensor, keys_BL: Tensor, window: int | None) -> Tensor:
        return build_additive_mask(queries_BS, keys_BL, window, self.zero, torch.finfo(self.zero.dtype).min)


def build_additive_mask(queries_BS: Tensor, keys_BL: Tensor, window: int | None, zero: Tensor, least: float) -> Tensor:
    """Returns 0 where a query sees a key and the least number elsewhere, `[B, 1, S, L]`; compiled by TorchScript, too.

    Args:
        queries_BS: Position of each query.
        keys_BL: Position of each key.
        window: Number of tokens that a query sees, itself included; None: all earlier ones.
        zero: 0 with the mask's dtype and device.
        least: The least number of that dtype.
    """
    queries_BS1, keys_B1L = queries_BS[:, :, None], keys_BL[:, None, :]
    seen_BSL = keys_B1L <= queries_BS1
    if window is not None:
        seen_BSL = seen_BSL & (keys_B1L > queries_BS1 - window)
    return torch.where(seen_BSL, zero, least)[:, None]
