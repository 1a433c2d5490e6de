"""The KV cache of the running batch: one slot per reply, filled by a prefill and extended by each decode step.

Slots are compact: replies use slots 0..B-1, and when one leaves, the last one moves into its slot. Modules see the
cache through transformers' own `Cache`; `fast_llama.py` writes into the slots directly. Layers with states of a fixed
size (`model_cache.py`) have slots for those, which a step overwrites.

Shapes: S slots, C their capacity in tokens, L tokens that a step attends to, B rows, H heads, D size of a head.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.model_cache import LayerStates, LeftPadding, ModelCache, PrefillCacheLayer

LENGTH_MULTIPLE = 16
"""Lengths are rounded up to this: fewer shapes, and logits that do not depend on the rest of the batch."""

LEAST_LENGTH = 32
"""Over 16 tokens, with heads of 16 numbers, torch rounds attention scores differently than over 32 or more, so the
last bits of a short reply depended on whether a longer one was beside it."""

MIN_ROWS = 4
"""Decode steps run at least this many rows, for the same reason; empty rows attend to their own first token."""


def round_up(length: int) -> int:
    """Returns the next multiple of `LENGTH_MULTIPLE`, at least `LEAST_LENGTH`.

    Example: 16 -> 32, 32 -> 32, 33 -> 48.
    """
    return -(-max(length, LEAST_LENGTH) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


class KVCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, `[S, H, C, D]`: the keys of one head are adjacent in memory."""

    def __init__(self, cache: KVCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the slots for keys and values of these shapes, `[B, H, T, D]`."""
        self.keys, self.values = (
            make_zeros(states, (self.cache.num_slots, states.shape[1], self.cache.capacity, states.shape[3]))
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


class KVCache(ModelCache):
    """The slots of all layers.

    Attributes:
        num_slots: S; grows with the replies in flight, up to `max_slots`.
        capacity: C, a multiple of `LENGTH_MULTIPLE`; grows with the longest of them.
        needed_s: When a step last needed half of that.
        num_rows, length: B and L of the current step.
        kv_layers: The layers with keys and values.
        slot_states: States of all slots, `[S, ...]`, of each layer that has some; `states` views the step's rows.
    """

    def __init__(self, model: CausalModel, max_slots: int):
        self.max_slots, self.num_slots = max(max_slots, MIN_ROWS), MIN_ROWS
        self.device = model.device
        self.capacity, self.needed_s = 0, 0.0
        self.num_rows, self.length = 0, 0
        self._positions_B: Tensor
        self._indices: dict[int, Tensor] = {}
        layers = [KVCacheLayer(self) if kind.has_keys else DummyLayer() for kind in model.layer_kinds]
        self.kv_layers = [layer for layer in layers if isinstance(layer, KVCacheLayer)]
        self.slot_states = [LayerStates() if kind.has_states else None for kind in model.layer_kinds]
        self._has_states = model.has_states
        super().__init__(layers, [None] * len(layers))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer; 0 before any prompt was computed."""
        slots = self._list_slots()[:2]
        return sum(each.nbytes for each in slots) // max(1, self.num_slots * self.capacity)

    @property
    def num_bytes(self) -> int:
        return sum(slots.nbytes for slots in (*self._list_slots(), *self._list_states()))

    def reserve(self, length: int, num_rows: int, num_slots: int) -> None:
        """Makes room for `length` tokens in `num_slots` slots and keeps the contents of the first `num_rows`."""
        if 2 * length * num_slots > self.capacity * self.num_slots:
            self.needed_s = time.monotonic()
        if num_slots > self.num_slots:
            num_slots = min(max(num_slots, 2 * self.num_slots), self.max_slots)
        if length > self.capacity:
            length = round_up(max(length, self.capacity * 3 // 2))
        if num_slots > self.num_slots or length > self.capacity:
            self._resize(max(num_slots, self.num_slots), max(length, self.capacity), num_rows)

    def release(self, length: int, num_rows: int, unused_s: float) -> bool:
        """Frees all but `length` tokens of the first slots if half was not needed for some seconds; returns if so."""
        num_slots, capacity = max(num_rows, MIN_ROWS), round_up(length)
        is_large = 2 * capacity * num_slots <= self.capacity * self.num_slots
        if frees := is_large and time.monotonic() - self.needed_s >= unused_s:
            self._resize(num_slots, capacity, num_rows)
        return frees

    def _resize(self, num_slots: int, capacity: int, num_rows: int) -> None:
        part = (slice(num_rows), slice(None), slice(min(capacity, self.capacity)))
        for layer in self.kv_layers:
            if layer.is_initialized:
                layer.keys, layer.values = (
                    _copy_part(slots, (num_slots, slots.shape[1], capacity, slots.shape[3]), part)
                    for slots in (layer.keys, layer.values)
                )
        for states in self.slot_states:
            for tensors in () if states is None else states.list_kinds():
                tensors.update({n: _copy_part(t, (num_slots, *t.shape[1:]), part[:1]) for n, t in tensors.items()})
        # last: if memory runs out before, the same call works again
        self.num_slots, self.capacity = num_slots, capacity

    def fill(self, prompts: ModelCache, sources: Tensor, first: int, padding: LeftPadding | None = None) -> None:
        """Copies prompts into slots `first`, `first + 1`, ...: one prompt may fill many.

        Args:
            prompts: Keys and values `[B, H, T, D]`, and states `[B, ...]`.
            sources: `[n]` prompt of each slot.
            padding: How the prompts were padded; None: on the right, if at all.
        """
        starts = None if padding is None else padding.starts
        for layer, own in zip(self.layers, prompts.layers, strict=True):
            if not isinstance(layer, KVCacheLayer) or own.keys is None:
                continue  # the layer has none, or uses those of another layer
            if not layer.is_initialized:
                layer.lazy_initialization(own.keys, own.values)
            for slots, states in ((layer.keys, own.keys), (layer.values, own.values)):
                moved = states if starts is None else _move_left(states, starts)
                copy_into_slots(slots, moved, sources, first)
        for slot_states, states in zip(self.slot_states, prompts.states, strict=True):
            if slot_states is not None:
                assert states is not None
                self._fill_states(slot_states, states.select(sources), first)

    def _fill_states(self, slot_states: LayerStates, states: LayerStates, first: int) -> None:
        for slots, own in zip(slot_states.list_kinds(), states.list_kinds(), strict=True):
            for number, tensor in own.items():
                if number not in slots:
                    slots[number] = tensor.new_zeros(self.num_slots, *tensor.shape[1:])
                slots[number][first : first + len(tensor)] = tensor

    def copy_out(self, slot: int, length: int) -> Sequence[Tensor]:
        """Returns a copy of the first `length` tokens of a slot: keys, then values, of each layer, `[H, T, D]`.

        States, `[...]`, come last: those after the last token of the slot.
        """
        parts = [slots[slot, :, :length] for slots in self._list_slots()]
        states = [slots[slot].clone() for slots in self._list_states()]
        equal_shapes = len({part.shape for part in parts}) == 1  # then one copy, several times as fast as many
        copies = torch.stack(parts).unbind() if equal_shapes else [part.clone() for part in parts]
        return [*copies, *states] if states else copies

    def copy_in(self, states: Sequence[Tensor], length: int, slot: int) -> None:
        slots = self._list_slots()
        for target, source in zip(slots, states[: len(slots)], strict=True):
            target[slot, :, :length] = source[:, :length]
        for target, source in zip(self._list_states(), states[len(slots) :], strict=True):
            target[slot] = source

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> None:
        """Copies the first `length` tokens and the states of slots `sources` to `targets`, which may be the same."""
        source_rows, target_rows = torch.from_numpy(sources).to(self.device), torch.from_numpy(targets).to(self.device)
        for slots in self._list_slots():
            slots[target_rows, :, :length] = slots[source_rows, :, :length]
        for slots in self._list_states():
            slots[target_rows] = slots[source_rows]

    def _list_slots(self) -> list[Tensor]:
        return [slots for layer in self.kv_layers if layer.is_initialized for slots in (layer.keys, layer.values)]

    def _list_states(self) -> list[Tensor]:
        return [tensor for states in self.slot_states if states is not None for tensor in states.list_tensors()]

    def view_states(self, rows: slice) -> list[LayerStates | None]:
        """Returns the states of some slots as views, which a forward overwrites."""
        return [
            states if states is None else states.convert(lambda slots: slots[rows], in_place=True)
            for states in self.slot_states
        ]

    def begin_step(self, positions_B: Tensor, length: int) -> None:
        """Sets where the tokens of the next forward go: row b at `positions_B[b]`, all rows within `length`."""
        self.num_rows, self.length = len(positions_B), length
        self._positions_B = positions_B
        self._indices.clear()
        if self._has_states:
            self.states = self.view_states(slice(0, self.num_rows))

    def write_indices(self, num_heads: int) -> Tensor:
        """Returns where the step's tokens go in `[S * H * C]`, `[B * H]`; built once per step, not once per layer."""
        if num_heads not in self._indices:
            self._indices[num_heads] = build_write_indices(self._positions_B, num_heads, self.capacity)
        return self._indices[num_heads]


def make_zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns zeros of a tensor's type and device.

    On the CPU the system provides each page when it is first written. One long reply makes every slot long, and
    clearing gigabytes that are never used would stall the other replies for seconds.
    """
    if like.device.type != "cpu" or 0 in shape:  # no pages at all cannot be mapped
        return like.new_zeros(shape)
    try:
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for a KV cache of {shape}: {error}") from error
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def _copy_part(slots: Tensor, shape: tuple[int, ...], part: tuple[slice, ...]) -> Tensor:
    """Returns slots of another shape with the same contents in one part."""
    copied = make_zeros(slots, shape)
    copied[part] = slots[part]
    return copied


def _move_left(states: Tensor, starts_B: Tensor) -> Tensor:
    """Returns rows that begin at some columns as rows that begin at column 0, `[B, H, T, D]`."""
    width = states.shape[2]
    columns_BT = (starts_B[:, None] + torch.arange(width, device=starts_B.device)).clamp(max=width - 1)
    return torch.take_along_dim(states, columns_BT[:, None, :, None], dim=2)


def copy_into_slots(slots: Tensor, states: Tensor, sources: Tensor, first: int) -> None:
    """Copies row `sources[i]` of `[B, H, T, D]` to slot `first + i` of `[S, H, C, D]`; compiled by TorchScript, too."""
    slots[first : first + sources.shape[0], :, : states.shape[2]].copy_(states.index_select(0, sources))


def build_write_indices(positions_B: Tensor, num_heads: int, capacity: int) -> Tensor:
    """Returns the index of one token of each row and head in slots viewed as `[S * H * C]`: `[B * H]`."""
    lanes = torch.arange(positions_B.shape[0] * num_heads, device=positions_B.device).view(-1, num_heads)
    return (lanes * capacity + positions_B[:, None]).view(-1)
