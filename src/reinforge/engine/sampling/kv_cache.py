"""The KV cache of the running batch: one slot per reply, filled by a prefill and extended by each decode step.

Slots are compact: replies use slots 0..B-1, and when one leaves, the last one moves into its slot. Modules see the
cache through transformers' own `Cache`; `fast_llama.py` writes into the slots directly.

Shapes: S slots, C their capacity in tokens, L tokens that a step attends to, B rows, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.prompt_cache import PrefillCacheLayer

LENGTH_MULTIPLE = 16
"""Lengths are rounded up to this: fewer shapes, and logits that do not depend on the rest of the batch."""

MIN_ROWS = 4
"""Decode steps run at least this many rows, for the same reason; empty rows attend to their own first token."""


def round_up(length: int) -> int:
    """Returns the next multiple of `LENGTH_MULTIPLE`.

    Example: 16 -> 16, 17 -> 32.
    """
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class KVCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, `[S, H, C, D]`: the keys of one head are adjacent in memory."""

    def __init__(self, cache: KVCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the slots for keys and values of these shapes, `[B, H, T, D]`."""
        self.keys, self.values = (
            states.new_zeros(self.cache.num_slots, states.shape[1], self.cache.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the step's token of each row, `[B, H, 1, D]`, and returns the rows, `[B, H, L, D]`."""
        rows, length, indices = self.cache.num_rows, self.cache.length, self.cache.write_indices(key_states.shape[1])
        for slots, states in ((self.keys, key_states), (self.values, value_states)):
            slots.view(-1, slots.shape[3]).index_copy_(0, indices, states.reshape(-1, slots.shape[3]))
        return self.keys[:rows, :, :length], self.values[:rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns length and offset of the keys that a query sees."""
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        """Returns the tokens that a step attends to; positions are always passed explicitly."""
        return self.cache.length

    def get_max_length(self) -> int:
        """Returns -1: the slots grow."""
        return -1


class AppendCacheLayer(PrefillCacheLayer):
    """Appends new tokens of rows, `[B, H, S, D]`, to their slots; they attend to all tokens of the slot.

    Args:
        layer: The slots.
        rows: Slots of the rows.
        positions_BS: Position of each new token.
        length: Tokens of a slot to attend to, L.
    """

    def __init__(self, layer: KVCacheLayer, rows: slice, positions_BS: Tensor, length: int):
        super().__init__()
        self.layer, self.rows, self.positions_BS, self.length = layer, rows, positions_BS, length
        self._rows_B1 = torch.arange(rows.start, rows.stop, device=positions_BS.device)[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the tokens at their positions and returns the rows, `[B, H, L, D]`."""
        for slots, states in ((self.layer.keys, key_states), (self.layer.values, value_states)):
            slots[self._rows_B1, :, self.positions_BS] = states.transpose(1, 2)
        return self.layer.keys[self.rows, :, : self.length], self.layer.values[self.rows, :, : self.length]


class KVCache(Cache):
    """The slots of all layers.

    Attributes:
        num_slots: S.
        capacity: C, a multiple of `LENGTH_MULTIPLE`; grows with the replies.
        num_rows, length: B and L of the current step.
    """

    def __init__(self, model: CausalModel, num_slots: int):
        self.num_slots = max(num_slots, MIN_ROWS)
        self.device = model.device
        self.capacity = 0
        self.num_rows, self.length = 0, 0
        self._positions_B: Tensor
        self._indices: dict[int, Tensor] = {}
        super().__init__(layers=[KVCacheLayer(self) for _ in range(model.num_layers)])

    def reserve(self, length: int, num_rows: int) -> None:
        """Makes room for `length` tokens per slot and keeps the contents of the first `num_rows`."""
        if length <= self.capacity:
            return
        capacity, used = round_up(max(length, self.capacity * 3 // 2)), self.capacity if num_rows else 0
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (
                    self._grow(slots, capacity, used, num_rows) for slots in (layer.keys, layer.values)
                )
        self.capacity = capacity  # last: if memory runs out before, the same call works again

    def _grow(self, slots: Tensor, capacity: int, length: int, num_rows: int) -> Tensor:
        grown = slots.new_zeros(self.num_slots, slots.shape[1], capacity, slots.shape[3])
        grown[:num_rows, :, :length] = slots[:num_rows, :, :length]
        return grown

    def fill(self, keys: Sequence[Tensor], values: Sequence[Tensor], sources: Tensor, first: int) -> None:
        """Copies prompts into slots `first`, `first + 1`, ...: one prompt may fill many.

        Args:
            keys: Keys of the prompts, by layer, `[B, H, T, D]`.
            values: Values, with the same shapes.
            sources: `[n]` prompt of each slot.
            first: The first slot to fill.
        """
        for layer, own_keys, own_values in zip(self.layers, keys, values, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(own_keys, own_values)
            for slots, states in ((layer.keys, own_keys), (layer.values, own_values)):
                copy_into_slots(slots, states, sources, first)

    def copy_out(self, slot: int, length: int) -> Sequence[Tensor]:
        """Returns a copy of the first `length` tokens of a slot: keys, then values, of each layer, `[H, T, D]`."""
        parts = [slots[slot, :, :length] for layer in self.layers for slots in (layer.keys, layer.values)]
        equal_shapes = len({part.shape for part in parts}) == 1  # then one copy, several times as fast as many
        return torch.stack(parts).unbind() if equal_shapes else [part.clone() for part in parts]

    def copy_in(self, states: Sequence[Tensor], length: int, slot: int) -> None:
        """Copies the first `length` tokens of what `copy_out` returned into a slot."""
        slots = (slots for layer in self.layers for slots in (layer.keys, layer.values))
        for target, source in zip(slots, states, strict=True):
            target[slot, :, :length] = source[:, :length]

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> None:
        """Copies the first `length` tokens of slots `sources` to slots `targets`."""
        source_rows, target_rows = torch.from_numpy(sources).to(self.device), torch.from_numpy(targets).to(self.device)
        for layer in self.layers:
            for slots in (layer.keys, layer.values):
                slots[target_rows, :, :length] = slots[source_rows, :, :length]

    def begin_step(self, positions_B: Tensor, length: int) -> None:
        """Sets where the tokens of the next forward go: row b at `positions_B[b]`, all rows within `length`."""
        self.num_rows, self.length = len(positions_B), length
        self._positions_B = positions_B
        self._indices.clear()

    def write_indices(self, num_heads: int) -> Tensor:
        """Returns where the step's tokens go in `[S * H * C]`, `[B * H]`; built once per step, not once per layer."""
        if num_heads not in self._indices:
            self._indices[num_heads] = build_write_indices(self._positions_B, num_heads, self.capacity)
        return self._indices[num_heads]


def copy_into_slots(slots: Tensor, states: Tensor, sources: Tensor, first: int) -> None:
    """Copies row `sources[i]` of `[B, H, T, D]` to slot `first + i` of `[S, H, C, D]`; compiled by TorchScript, too."""
    slots[first : first + sources.shape[0], :, : states.shape[2]].copy_(states.index_select(0, sources))


def build_write_indices(positions_B: Tensor, num_heads: int, capacity: int) -> Tensor:
    """Returns the index of one token of each row and head in slots viewed as `[S * H * C]`: `[B * H]`."""
    lanes = torch.arange(positions_B.shape[0] * num_heads, device=positions_B.device).view(-1, num_heads)
    return (lanes * capacity + positions_B[:, None]).view(-1)
