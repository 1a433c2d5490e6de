"""The weights of a Llama-like model as `fast_llama.py` multiplies them: copies made once, with each adapter's own.

An adapter's copies are made when a row first uses it, and dropped before its weights change; the model's own stay
meanwhile where other adapters keep sampling.

Shapes: H features, N query heads, K key and value heads, D size of a head, I features inside the MLP, L positions, V
vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.sampling.kv_cache import round_up
from reinforge.engine.sampling.projection import (
    Projection,
    Weight,
    can_halve,
    collect_adapter,
    collect_projection,
    pack_weight,
)

MAX_MIXTURES = 16
"""Sets of adapters in one batch whose lists of weights are kept: making a new one takes a part of a millisecond."""


class LayerWeights(NamedTuple):
    """The weights of one layer."""

    norm: Tensor  # before attention, `[H]`
    qkv: Projection  # to queries, keys and values, `[(N + 2 K) D, H]`
    query_norm: Tensor | None  # of each head's queries, `[D]`
    key_norm: Tensor | None  # of each head's keys, `[D]`
    out: Projection  # after attention, `[H, N D]`
    mlp_norm: Tensor  # before the MLP, `[H]`
    gate_up: Projection  # to gate and up, `[2 I, H]`
    down: Projection  # after them, `[H, I]`


class OuterWeights(NamedTuple):
    """The weights before and after the layers, and the rotary embeddings."""

    embedding: Tensor  # the features of each token of the vocabulary, `[V, H]`
    norm: Tensor  # before the output layer, `[H]`
    head: Weight  # the output layer, `[V, H]`
    cos: Tensor  # of the rotation at each position, `[L, D]`
    sin: Tensor  # the same; its first half is negated


class LlamaWeights:
    """The copies of one model's weights."""

    def __init__(self, model: CausalModel):
        self.model, self.base = model, model.base
        self._layers: list[LayerWeights] = []
        self._head: Weight | None = None
        self._half = can_halve(model)
        self._rotation: tuple[Tensor, Tensor] | None = None
        self._adapters: dict[str, list[list[tuple[Tensor, Tensor]]]] = {}
        self._mixtures: dict[tuple[str, ...], list[LayerWeights]] = {}

    def collect_layers(self, adapters: tuple[str, ...]) -> list[LayerWeights]:
        if adapters not in self._mixtures:
            if len(self._mixtures) == MAX_MIXTURES:
                self._mixtures.clear()
            self._mixtures[adapters] = self._mix(adapters)
        return self._mixtures[adapters]

    def collect_outer(self, length: int) -> OuterWeights:
        """Returns the weights outside of the layers, with rotary embeddings of at least this many positions."""
        if self._rotation is None or len(self._rotation[0]) < length:
            positions = torch.arange(2 * round_up(length), device=self.model.device)
            cos, sin = self.base.rotary_emb(self.base.norm.weight, positions[None])
            half = cos.shape[2] // 2
            self._rotation = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=1)
        if self._head is None:
            self._head = pack_weight(self.model.head.weight.detach(), None, half=self._half)
        return OuterWeights(self.base.embed_tokens.weight, self.base.norm.weight, self._head, *self._rotation)

    def drop(self, adapter: str | None) -> None:
        """Drops the copies of an adapter's weights; None: of all weights."""
        self._mixtures.clear()
        if adapter is not None:
            self._adapters.pop(adapter, None)
            return
        self._adapters.clear()
        self._layers.clear()
        self._head = None

    def _mix(self, adapters: tuple[str, ...]) -> list[LayerWeights]:
        if not self._layers:
            self._layers = [_collect_weights(layer, half=self._half) for layer in self.base.layers]
        for name in adapters:
            if name not in self._adapters:
                self._adapters[name] = [
                    [collect_adapter(group, name) for group in group_linears(layer)] for layer in self.base.layers
                ]
        chosen = [self._adapters[name] for name in adapters]
        return [_add_adapters(layer, [each[number] for each in chosen]) for number, layer in enumerate(self._layers)]


def group_linears(layer: Any) -> list[tuple[Any, ...]]:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = attention.q_proj, attention.k_proj, attention.v_proj
    return [inputs, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)]


def _collect_weights(layer: Any, *, half: bool) -> LayerWeights:
    """Returns the copies of a layer's weights, without adapters."""
    qkv, out, gate_up, down = (collect_projection(group, half=half) for group in group_linears(layer))
    attention = layer.self_attn
    return LayerWeights(
        norm=layer.input_layernorm.weight.detach(),
        qkv=qkv,
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=out,
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gate_up,
        down=down,
    )


def _add_adapters(layer: LayerWeights, adapters: list[list[tuple[Tensor, Tensor]]]) -> LayerWeights:
    """Returns a layer with adapters, of each of which there is a pair for each of the layer's four products."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    qkv, out, gate_up, down = (
        product._replace(downs=[each[n][0] for each in adapters], ups=[each[n][1] for each in adapters])
        for n, product in enumerate(products)
    )
    return layer._replace(qkv=qkv, out=out, gate_up=gate_up, down=down)
