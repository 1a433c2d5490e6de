"""A cache layer that holds the keys and values of whole prompts, for prefill and for shared prefixes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class PrefillCacheLayer(CacheLayerMixin):
    """Holds the keys and values of whole prompts, `[B, H, T, D]`."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: `update` stores the tensors without a buffer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        """Returns -1: unlimited."""
        return -1
