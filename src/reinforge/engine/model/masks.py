"""Explicit attention masks, one by kind where a model's layers differ (full and sliding attention).

Masks are added to the scores, which every attention function takes; sdpa would turn a bool one into this in each layer
anew. Shapes: B rows, S queries, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reinforge.engine.model.attention import NAME
from reinforge.engine.model.causal_model import CausalModel
from reinforge.errors import EngineError


class AttentionMasks:
    """Makes the masks of one model.

    Attributes:
        joins: Suffixes of shared prefixes need no mask, as long as nothing slides: set by who has tried it.
        stems: What different prompts begin with is shared too, likewise.

    Raises:
        EngineError: The model's attention is of a kind that takes no explicit mask.
    """

    joins = False
    stems = False

    def __init__(self, model: CausalModel):
        if model.attention not in (NAME, "sdpa", "eager"):
            raise EngineError(f"the sampler knows the attention functions sdpa and eager, not {model.attention!r}")
        self.kinds = set(getattr(model.config, "layer_types", None) or [])
        unknown = self.kinds - {"full_attention", "sliding_attention"}
        if unknown:
            raise EngineError(f"the sampler cannot cache layers of type {', '.join(sorted(unknown))}")
        slides = self.kinds != {"full_attention"}
        self.window: int | None = getattr(model.config, "sliding_window", None) if slides else None
        self.zero = torch.zeros((), dtype=model.dtype, device=model.device)

    def reach(self, length: int) -> bool:
        """Returns True if every token of so many sees all that come before it."""
        return self.window is None or length <= self.window

    def unused(self) -> Tensor | dict[str, Tensor]:
        """Returns a mask that nobody reads, which keeps a model from making one, `[1, 1, 1, 1]`."""
        nowhere = torch.zeros(1, 1, dtype=torch.long, device=self.zero.device)
        return self.between(nowhere, nowhere)

    def step(self, positions_B: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """Returns the mask of one new token a row over its cache of `length` places, `[B, 1, 1, L]`."""
        places_L = torch.arange(length, device=positions_B.device)
        return self.between(positions_B[:, None], places_L[None])

    def between(self, queries_BS: Tensor, keys_BL: Tensor) -> Tensor | dict[str, Tensor]:
        """Returns 0 where a query sees a key and the least number elsewhere, `[B, 1, S, L]`.

        Args:
            queries_BS: Position of each query.
            keys_BL: Position of each key; one beyond every query is seen by none.
        """
        full = self._added(queries_BS, keys_BL, None)
        if self.window is None:
            return full
        sliding = self._added(queries_BS, keys_BL, self.window)
        return {"full_attention": full, "sliding_attention": sliding} if len(self.kinds) > 1 else sliding

    def _added(self, queries_BS: Tensor, keys_BL: Tensor, window: int | None) -> Tensor:
        return added_mask(queries_BS, keys_BL, window, self.zero, torch.finfo(self.zero.dtype).min)


def added_mask(queries_BS: Tensor, keys_BL: Tensor, window: int | None, zero: Tensor, least: float) -> Tensor:
    """Returns 0 where a query sees a key and the least number elsewhere, `[B, 1, S, L]`; TorchScript runs it too.

    Args:
        queries_BS: Position of each query.
        keys_BL: Position of each key.
        window: How many places back a query sees, its own among them; None: all.
        zero: Of the mask's type, on its device.
        least: The least number of that type.
    """
    queries_BS1, keys_B1L = queries_BS[:, :, None], keys_BL[:, None, :]
    seen_BSL = keys_B1L <= queries_BS1
    if window is not None:
        seen_BSL = seen_BSL & (keys_B1L > queries_BS1 - window)
    return torch.where(seen_BSL, zero, least)[:, None]
