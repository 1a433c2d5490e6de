"""What a model's layers keep between tokens: keys and values, states of a fixed size, both, or nothing.

    attention                    keys and values of every token
    linear attention, Mamba      a recurrent state, and the last inputs of a short convolution
    short convolution (LFM2)     its last inputs
    feed-forward, shared keys    nothing: Nemotron-H's expert layers, the upper layers of Gemma 3n and 4

A state has no positions. It exists only after the last token that was computed, so it cannot be cut back to an earlier
one, and a token of padding changes it, unless the padding comes first and the model multiplies it by 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from reinforge.errors import EngineError


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


KEEPS_KEYS = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""transformers' cache layers with keys and values."""

KEEPS_STATES = {
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""transformers' cache layers with states."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer keeps between tokens."""

    name: str  # its type in the model's configuration, such as `full_attention`
    has_keys: bool  # True for keys and values
    has_states: bool  # True for states


def find_layer_kinds(config: Any) -> list[LayerKind]:
    """Returns what each layer keeps, by the cache layers that transformers makes for this configuration."""
    kinds = []
    for name in get_layer_types_and_kwargs(config)[0]:
        kept = DYNAMIC_LAYER_TYPE_MAPPING.get(name)
        if kept is None or (kept is not DummyLayer and kept not in KEEPS_KEYS | KEEPS_STATES):
            raise EngineError(f"cannot sample from {config.model_type!r} models: no cache for layers of type {name!r}")
        kinds.append(LayerKind(name, kept in KEEPS_KEYS, kept in KEEPS_STATES))
    return kinds


@dataclass(slots=True)
class LayerStates:
    """States of one layer, `[B, ...]` each, by number: a layer may have several."""

    convolution: dict[int, Tensor] = field(default_factory=dict)  # the last inputs of a convolution, `[B, C, k]`
    recurrent: dict[int, Tensor] = field(default_factory=dict)  # recurrent states
    in_place: bool = False
    """True if new states overwrite the tensors, which are then views of the sampler's slots; else they replace them,
    and gradients flow from the new states to the old."""

    def store(self, states: dict[int, Tensor], number: int, new: Tensor) -> Tensor:
        if self.in_place:
            return states[number].copy_(new)
        states[number] = new
        return new

    def select(self, rows: Tensor) -> LayerStates:
        return self.convert(lambda states: states.index_select(0, rows))

    def convert(self, function: Callable[[Tensor], Tensor], *, in_place: bool = False) -> LayerStates:
        convolution, recurrent = ({n: function(s) for n, s in states.items()} for states in self.list_kinds())
        return LayerStates(convolution, recurrent, in_place)

    def list_kinds(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return self.convolution, self.recurrent

    def list_tensors(self) -> list[Tensor]:
        return [states[number] for states in self.list_kinds() for number in sorted(states)]


class ModelCache(Cache):
    """A transformers cache that takes states from `LayerStates`, and keys and values from any cache layer.

    Args:
        layers: Keys and values of each layer; `DummyLayer` where there are none.
        states: States of each layer; None where there are none.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin | DummyLayer], states: Sequence[LayerStates | None]):
        self.states = list(states)
        super().__init__(layers=list(layers))

    def _find_states(self, layer_idx: int) -> LayerStates:
        if (states := self.states[layer_idx]) is None:
            raise ValueError(f"layer {layer_idx} keeps no states")
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, `[B, C, k]`; None before the first token."""
        return self._find_states(layer_idx).convolution.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a recurrent state; None before the first token."""
        return self._find_states(layer_idx).recurrent.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Returns True after the first token."""
        found = [s for s in self.states if s is not None] if layer_idx is None else [self._find_states(layer_idx)]
        return any(bool(tensors) for states in found for tensors in states.list_kinds())

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Keeps the last inputs of a convolution and returns the earlier ones followed by the new, `[B, C, k + T]`."""
        states = self._find_states(layer_idx)
        previous = states.convolution.get(state_idx)
        if previous is None:
            size = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size, whole = previous.shape[-1], torch.cat((previous, conv_states), dim=-1)
        states.store(states.convolution, state_idx, whole[..., -size:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        states = self._find_states(layer_idx)
        return states.store(states.recurrent, state_idx, recurrent_states)


def make_prefill_cache(kinds: Sequence[LayerKind]) -> ModelCache:
    layers = [PrefillCacheLayer() if kind.has_keys else DummyLayer() for kind in kinds]
    return ModelCache(layers, [LayerStates() if kind.has_states else None for kind in kinds])


@dataclass(frozen=True, slots=True, eq=False)
class LeftPadding:
    """Rows of different lengths that end at the same column, so that states are those after each row's last token.

    a b c         a b c
    d         =>  . . d      is_token 1 1 1 and 0 0 1, positions 0 1 2 and 0 0 0
    """

    starts: Tensor  # `[B]` column of each row's first token
    positions: Tensor  # `[B, T]` positions, which are the columns before the shift; 0 for padding
    key_positions: Tensor  # `[B, T]` the same, with the greatest integer for padding, which no query sees then
    is_token: Tensor  # `[B, T]` 1 for tokens and 0 for padding, by which the model multiplies what its states take in

    @classmethod
    def from_lengths(cls, lengths_B: Tensor, width: int, dtype: torch.dtype) -> LeftPadding:
        starts_B = width - lengths_B
        places_BT = torch.arange(width, device=lengths_B.device) - starts_B[:, None]
        is_token_BT = places_BT >= 0
        positions_BT = places_BT.clamp(min=0)
        unseen = torch.iinfo(torch.int64).max
        return cls(starts_B, positions_BT, torch.where(is_token_BT, places_BT, unseen), is_token_BT.to(dtype))
