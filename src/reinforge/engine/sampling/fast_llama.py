"""Models of Llama's type by their own weights in fewer operations: the tokens that sampling computes.

Transformers' modules are right for every family, and on small models half of a decode step is calls and small
operations, between any two of which the thread waits for Python's lock while agents run. Models of Llama's type
(RMSNorm, attention with rotation, RMSNorm, gated MLP) are here one function from token ids to logits: queries, keys and
values by one product, gate and up by a batch of two, residuals added by the products before them. TorchScript runs it
without that lock (`scripted.py`). Figures: docs/performance.md. The sampler compares what it gives with a plain forward
when it is made, and takes the modules where they differ.

Shapes: B rows, T new tokens of a row, M = B T, L tokens that a step looks at, S slots, C their capacity, H features, N
heads of queries, K of keys and values, D size of a head, I features within the MLP, V words.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.engine.model.attention import NAME, step_attention
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks, added_mask
from reinforge.engine.sampling.kv_cache import SlotCache, fill_slots, round_up, step_places
from reinforge.engine.sampling.torchscript import scripted

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of rotation that depend on a token's place alone, and not on how far a batch reaches."""

MAX_COPIED_BYTES = 64 * 2**20
"""Most memory of weights side by side: where they are larger, products take all the time, whoever calls them."""

MAX_PROMPT = 128
"""Longest prompts that are read here: in longer ones attention in chunks (`causal.py`) is worth more than few calls."""


class Sizes(NamedTuple):
    """What a model's layers have in common.

    Attributes:
        queries, keys: N and K.
        head: D.
        scale: Factor of the scores.
        eps: Of every norm.
        least: What a mask adds where nothing is seen.
    """

    queries: int
    keys: int
    head: int
    scale: float
    eps: float
    least: float


class Weights(NamedTuple):
    """One layer.

    Attributes:
        norm: Before attention, `[H]`.
        heads: Of queries, keys and values, one below the other, `[(N + 2 K) D, H]`.
        bias: What is added to them.
        query_norm, key_norm: Of each head's queries and keys, `[D]`.
        out: `[N D, H]`.
        mlp_norm: Before the MLP, `[H]`.
        mlp: Of gate and up, `[2, H, I]`.
        down: `[I, H]`.
    """

    norm: Tensor
    heads: Tensor
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    mlp: Tensor
    down: Tensor


class Ends(NamedTuple):
    """What comes before and behind the layers.

    Attributes:
        words: The features that each word begins with, `[V, H]`.
        norm: Before the output layer, `[H]`.
        head: The output layer, `[V, H]`.
        cos, sin: Of the rotation of each place, `[L, D]`.
    """

    words: Tensor
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor


def _heads(x: Tensor, layer: Weights, cos: Tensor, sin: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, `[M, N, D]`, keys and values, `[M, K, D]`; `x` is `[M, H]`, `cos` and `sin` `[M, 1, D]`."""
    half, turned = sizes.head // 2, sizes.queries + sizes.keys
    normed = F.rms_norm(x, [x.shape[1]], layer.norm, sizes.eps)
    heads = F.linear(normed, layer.heads, layer.bias).view(x.shape[0], turned + sizes.keys, sizes.head)
    plain = heads[:, :turned]
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if query_norm is not None and key_norm is not None:
        query = F.rms_norm(heads[:, : sizes.queries], [sizes.head], query_norm, sizes.eps)
        key = F.rms_norm(heads[:, sizes.queries : turned], [sizes.head], key_norm, sizes.eps)
        plain = torch.cat((query, key), dim=1)
    states = plain * cos
    states[:, :, :half].addcmul_(plain[:, :, half:], sin[:, :, :half], value=-1.0)
    states[:, :, half:].addcmul_(plain[:, :, :half], sin[:, :, half:])
    return states[:, : sizes.queries], states[:, sizes.queries :], heads[:, turned:]


def _rest(x: Tensor, seen: Tensor, layer: Weights, sizes: Sizes) -> Tensor:
    """Returns what a layer gives, `[M, H]`, of what it was given and what its heads saw, `[M, N D]`."""
    x = torch.addmm(x, seen, layer.out)
    both = F.rms_norm(x, [x.shape[1]], layer.mlp_norm, sizes.eps).expand(2, -1, -1)
    parts = torch.bmm(both, layer.mlp)
    return torch.addmm(x, F.silu(parts[0]).mul_(parts[1]), layer.down)


def _logits(x: Tensor, ends: Ends, sizes: Sizes) -> Tensor:
    """Returns logits, `[B, V]`, of features, `[B, H]`."""
    return F.linear(F.rms_norm(x, [x.shape[1]], ends.norm, sizes.eps), ends.head)


def _decode(
    token_ids: Tensor,
    positions: Tensor,
    layers: list[Weights],
    ends: Ends,
    keys: list[Tensor],
    values: list[Tensor],
    slides: list[bool],
    window: int | None,
    length: int,
    sizes: Sizes,
) -> Tensor:
    """Returns the rows' logits after one more token each, whose keys and values go into the slots, `[S, K, C, D]`."""
    count = token_ids.shape[0]
    x = F.embedding(token_ids, ends.words)
    cos, sin = ends.cos.index_select(0, positions)[:, None], ends.sin.index_select(0, positions)[:, None]
    places = step_places(positions, sizes.keys, keys[0].shape[2])
    zero, looked_at = torch.zeros([], device=x.device), torch.arange(length, device=x.device)[None]
    full = added_mask(positions[:, None], looked_at, None, zero, sizes.least)
    sliding = full if window is None else added_mask(positions[:, None], looked_at, window, zero, sizes.least)
    for number, layer in enumerate(layers):
        query, key, value = _heads(x, layer, cos, sin, sizes)
        keys[number].view(-1, sizes.head).index_copy_(0, places, key.reshape(-1, sizes.head))
        values[number].view(-1, sizes.head).index_copy_(0, places, value.reshape(-1, sizes.head))
        own_keys, own_values = keys[number][:count, :, :length], values[number][:count, :, :length]
        seen = step_attention(query, own_keys, own_values, sliding if slides[number] else full, sizes.scale)
        x = _rest(x, seen.view(count, -1), layer, sizes)
    return _logits(x, ends, sizes)


def _read(
    token_ids: Tensor,
    last: Tensor,
    sources: Tensor,
    first: int,
    layers: list[Weights],
    ends: Ends,
    keys: list[Tensor],
    values: list[Tensor],
    sizes: Sizes,
) -> Tensor:
    """Returns the logits behind the places `last` of whole prompts, and puts their keys and values into slots."""
    count, length = token_ids.shape
    x = F.embedding(token_ids.flatten(), ends.words)
    cos, sin = ends.cos[:length].repeat(count, 1)[:, None], ends.sin[:length].repeat(count, 1)[:, None]
    for number, layer in enumerate(layers):
        query, key, value = _heads(x, layer, cos, sin, sizes)
        key = key.view(count, length, sizes.keys, sizes.head).transpose(1, 2)
        value = value.view(count, length, sizes.keys, sizes.head).transpose(1, 2)
        fill_slots(keys[number], key, sources, first)
        fill_slots(values[number], value, sources, first)
        query = query.view(count, length, sizes.queries, sizes.head).transpose(1, 2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=sizes.scale, enable_gqa=True)
        seen = seen.transpose(1, 2).reshape(x.shape[0], -1)
        if number == len(layers) - 1:
            x, seen = x.index_select(0, last), seen.index_select(0, last)
        x = _rest(x, seen, layer, sizes)
    return _logits(x, ends, sizes).index_select(0, sources)


class DirectLlama:
    """Reads prompts and makes decode steps of a model that `is_llama`.

    Args:
        model: The model; where its weights change, `forget` comes first.
        slots: The rows' keys and values.
        masks: Makes the masks of steps.
    """

    def __init__(self, model: CausalModel, slots: SlotCache, masks: AttentionMasks):
        self.model, self.base, self.slots, self.masks = model, model.base, slots, masks
        kinds = getattr(model.config, "layer_types", None) or [None] * model.num_layers
        self.slides = [kind != "full_attention" for kind in kinds]
        attention, eps = self.base.layers[0].self_attn, self.base.norm.variance_epsilon
        size = attention.head_dim
        heads = [part.out_features // size for part in (attention.q_proj, attention.k_proj)]
        self.sizes = Sizes(heads[0], heads[1], size, attention.scaling, eps, torch.finfo(model.dtype).min)
        self._decode, self._read = (scripted(function, model.device) for function in (_decode, _read))
        self._weights: list[Weights] = []
        self._rotation: tuple[Tensor, Tensor] | None = None

    def step(self, token_ids_B: Tensor, positions_B: Tensor, length: int) -> Tensor:
        """Returns the logits after one more token of each row, `[B, V]`.

        Args:
            token_ids_B: The newest token of each row.
            positions_B: Where it stands.
            length: L.
        """
        layers, ends, (keys, values) = self._layers(), self._ends(length), self._slots()
        slides, window = self.slides, self.masks.window
        return self._decode(token_ids_B, positions_B, layers, ends, keys, values, slides, window, length, self.sizes)

    def can_read(self, length: int) -> bool:
        """Returns True if prompts of this length are read here."""
        return length <= MAX_PROMPT and self.masks.reach(length)

    def read(self, token_ids_BT: Tensor, last_B: Tensor, sources_n: Tensor, first: int) -> Tensor:
        """Returns the logits of each reply's first token, `[n, V]`, and fills its slot.

        Args:
            token_ids_BT: Whole prompts, padded on the right.
            last_B: Where each ends, b T + t.
            sources_n: Which prompt each slot from `first` on is filled with.
            first: The first slot to fill; there is room for T tokens.
        """
        layers, ends, (keys, values) = self._layers(), self._ends(token_ids_BT.shape[1]), self._slots()
        return self._read(token_ids_BT, last_B, sources_n, first, layers, ends, keys, values, self.sizes)

    def forget(self) -> None:
        """Drops what is copied of the weights, which are about to change."""
        self._weights.clear()

    def _slots(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self.slots.layers
        for layer in layers:
            if not layer.is_initialized:
                nothing = self.base.norm.weight.new_empty(0, self.sizes.keys, 0, self.sizes.head)
                layer.lazy_initialization(nothing, nothing)
        return [layer.keys for layer in layers], [layer.values for layer in layers]

    def _ends(self, length: int) -> Ends:
        if self._rotation is None or len(self._rotation[0]) < length:
            places = torch.arange(2 * round_up(length), device=self.model.device)
            cos, sin = self.base.rotary_emb(self.base.norm.weight, places[None])
            self._rotation = cos[0], sin[0]
        return Ends(self.base.embed_tokens.weight, self.base.norm.weight, self.model.head.weight, *self._rotation)

    def _layers(self) -> list[Weights]:
        if not self._weights:
            self._weights = [_weights(layer) for layer in self.base.layers]
        return self._weights


def is_llama(model: CausalModel) -> bool:
    """Returns True if `DirectLlama` computes what this model computes, and is worth the memory."""
    config = model.config
    if config.model_type not in FAMILIES or model.dtype != torch.float32 or model.attention != NAME:
        return False
    if model.has_adapters or not model.has_plain_head or getattr(config, "hidden_act", None) != "silu":
        return False
    if getattr(model.base.rotary_emb, "rope_type", None) not in ROTATIONS:
        return False
    if type(model.base.embed_tokens) is not nn.Embedding:
        return False
    linear = [part for part in model.base.layers.modules() if isinstance(part, nn.Linear)]
    outputs = [part for layer in model.base.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if len(linear) != 7 * model.num_layers or any(part.bias is not None for part in outputs):
        return False
    size = 4 * sum(part.weight.numel() for layer in model.base.layers for part in _copied(layer))
    return size <= MAX_COPIED_BYTES and all(type(part) is nn.Linear for part in linear)


def _copied(layer: Any) -> tuple[nn.Linear, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


@torch.no_grad()
def _weights(layer: Any) -> Weights:
    *heads, gate, up = _copied(layer)
    attention = layer.self_attn
    return Weights(
        norm=layer.input_layernorm.weight.detach(),
        heads=torch.cat([part.weight for part in heads]),
        bias=None if heads[0].bias is None else torch.cat([part.bias for part in heads]),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight.detach().t(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        mlp=torch.stack((gate.weight.t(), up.weight.t())),
        down=layer.mlp.down_proj.weight.detach().t(),
    )
