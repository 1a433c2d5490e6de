"""Fast decoding of Llama-like models: decode steps and short prompts as one function over the model's weights.

Transformers' modules are right for every family. On a small model, though, half of a decode step is Python calls and
small operations, and between any two of them the thread waits for Python's lock while agents run. For Llama-like models
(RMSNorm, attention with rotary embeddings, RMSNorm, gated MLP) one function here goes from token ids to logits: one
product makes queries, keys and values, one batch of two makes gate and up, and residuals are added by the products
before them. TorchScript runs it without that lock (`torchscript.py`). docs/performance.md has the figures. The sampler
compares its logits with a plain forward when it starts, and uses the modules where they differ.

Shapes: B rows, T new tokens of a row, M = B T, L tokens that a step attends to, S slots, C their capacity, H features,
N query heads, K key and value heads, D size of a head, I features inside the MLP, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reinforge.engine.model.attention import GROUPED_ATTENTION, decode_attention
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks, build_additive_mask
from reinforge.engine.sampling.kv_cache import KVCache, build_write_indices, copy_into_slots, round_up
from reinforge.engine.sampling.torchscript import compile_torchscript

MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's position alone, not on the length of the batch."""

MAX_COPIED_BYTES = 64 * 2**20
"""Maximum memory for concatenated copies of weights: larger products take all the time, whatever calls them."""

MAX_PROMPT = 128
"""Longest prompts computed here: in longer ones, attention in chunks (`flash_attention.py`) saves more."""


class LlamaSizes(NamedTuple):
    """Sizes and constants that all layers of a model share.

    Attributes:
        num_heads, num_kv_heads: N and K.
        head_size: D.
        scale: Factor of the scores.
        eps: Of every norm.
        least: What a mask adds for a key that is not seen.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    eps: float
    least: float


class LayerWeights(NamedTuple):
    """The weights of one layer.

    Attributes:
        norm: Before attention, `[H]`.
        qkv: Of queries, keys and values, concatenated, `[(N + 2 K) D, H]`.
        qkv_bias: Their biases.
        query_norm, key_norm: Of each head's queries and keys, `[D]`.
        out: `[N D, H]`.
        mlp_norm: Before the MLP, `[H]`.
        gate_up: Of gate and up, `[2, H, I]`.
        down: `[I, H]`.
    """

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class OuterWeights(NamedTuple):
    """The weights before and after the layers, and the rotary embeddings.

    Attributes:
        embedding: The features of each token of the vocabulary, `[V, H]`.
        norm: Before the output layer, `[H]`.
        head: The output layer, `[V, H]`.
        cos, sin: Of the rotation at each position, `[L, D]`.
    """

    embedding: Tensor
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor


def _project_qkv(
    x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, sizes: LlamaSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, `[M, N, D]`, keys and values, `[M, K, D]`; `x` is `[M, H]`, `cos` and `sin` are `[M, 1, D]`."""
    half, num_rotated = sizes.head_size // 2, sizes.num_heads + sizes.num_kv_heads
    normed = F.rms_norm(x, [x.shape[1]], layer.norm, sizes.eps)
    heads = F.linear(normed, layer.qkv, layer.qkv_bias)
    heads = heads.view(x.shape[0], num_rotated + sizes.num_kv_heads, sizes.head_size)
    plain = heads[:, :num_rotated]
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if query_norm is not None and key_norm is not None:
        query = F.rms_norm(heads[:, : sizes.num_heads], [sizes.head_size], query_norm, sizes.eps)
        key = F.rms_norm(heads[:, sizes.num_heads : num_rotated], [sizes.head_size], key_norm, sizes.eps)
        plain = torch.cat((query, key), dim=1)
    states = plain * cos
    states[:, :, :half].addcmul_(plain[:, :, half:], sin[:, :, :half], value=-1.0)
    states[:, :, half:].addcmul_(plain[:, :, :half], sin[:, :, half:])
    return states[:, : sizes.num_heads], states[:, sizes.num_heads :], heads[:, num_rotated:]


def _finish_layer(x: Tensor, attended: Tensor, layer: LayerWeights, sizes: LlamaSizes) -> Tensor:
    """Returns a layer's output, `[M, H]`, from its input and the output of its attention heads, `[M, N D]`."""
    x = torch.addmm(x, attended, layer.out)
    both = F.rms_norm(x, [x.shape[1]], layer.mlp_norm, sizes.eps).expand(2, -1, -1)
    parts = torch.bmm(both, layer.gate_up)
    return torch.addmm(x, F.silu(parts[0]).mul_(parts[1]), layer.down)


def _compute_logits(x: Tensor, outer: OuterWeights, sizes: LlamaSizes) -> Tensor:
    """Returns logits, `[B, V]`, of features, `[B, H]`."""
    return F.linear(F.rms_norm(x, [x.shape[1]], outer.norm, sizes.eps), outer.head)


def _decode(
    token_ids: Tensor,
    positions: Tensor,
    layers: list[LayerWeights],
    outer: OuterWeights,
    keys: list[Tensor],
    values: list[Tensor],
    slides: list[bool],
    window: int | None,
    length: int,
    sizes: LlamaSizes,
) -> Tensor:
    """Returns the rows' logits after one more token each, and writes its keys and values into slots, `[S, K, C, D]`."""
    count = token_ids.shape[0]
    x = F.embedding(token_ids, outer.embedding)
    cos, sin = outer.cos.index_select(0, positions)[:, None], outer.sin.index_select(0, positions)[:, None]
    indices = build_write_indices(positions, sizes.num_kv_heads, keys[0].shape[2])
    zero, places = torch.zeros([], device=x.device), torch.arange(length, device=x.device)[None]
    full = build_additive_mask(positions[:, None], places, None, zero, sizes.least)
    sliding = full if window is None else build_additive_mask(positions[:, None], places, window, zero, sizes.least)
    for number, layer in enumerate(layers):
        query, key, value = _project_qkv(x, layer, cos, sin, sizes)
        keys[number].view(-1, sizes.head_size).index_copy_(0, indices, key.reshape(-1, sizes.head_size))
        values[number].view(-1, sizes.head_size).index_copy_(0, indices, value.reshape(-1, sizes.head_size))
        own_keys, own_values = keys[number][:count, :, :length], values[number][:count, :, :length]
        mask = sliding if slides[number] else full
        attended = decode_attention(query, own_keys, own_values, mask, sizes.scale)
        x = _finish_layer(x, attended.view(count, -1), layer, sizes)
    return _compute_logits(x, outer, sizes)


def _prefill(
    token_ids: Tensor,
    last: Tensor,
    sources: Tensor,
    first: int,
    layers: list[LayerWeights],
    outer: OuterWeights,
    keys: list[Tensor],
    values: list[Tensor],
    sizes: LlamaSizes,
) -> Tensor:
    """Returns the logits at the tokens `last` of whole prompts, and copies the prompts' keys and values into slots."""
    count, length = token_ids.shape
    x = F.embedding(token_ids.flatten(), outer.embedding)
    cos, sin = outer.cos[:length].repeat(count, 1)[:, None], outer.sin[:length].repeat(count, 1)[:, None]
    for number, layer in enumerate(layers):
        query, key, value = _project_qkv(x, layer, cos, sin, sizes)
        key = key.view(count, length, sizes.num_kv_heads, sizes.head_size).transpose(1, 2)
        value = value.view(count, length, sizes.num_kv_heads, sizes.head_size).transpose(1, 2)
        copy_into_slots(keys[number], key, sources, first)
        copy_into_slots(values[number], value, sources, first)
        query = query.view(count, length, sizes.num_heads, sizes.head_size).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=sizes.scale, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(x.shape[0], -1)
        if number == len(layers) - 1:
            x, attended = x.index_select(0, last), attended.index_select(0, last)
        x = _finish_layer(x, attended, layer, sizes)
    return _compute_logits(x, outer, sizes).index_select(0, sources)


class FastLlama:
    """Computes short prompts and decode steps of a model that `supports_fast_decode`.

    Args:
        model: The model; call `drop_weights` before its weights change.
        cache: The rows' keys and values.
        masks: Knows which layers have a window, and how long it is.
    """

    def __init__(self, model: CausalModel, cache: KVCache, masks: AttentionMasks):
        self.model, self.base, self.cache, self.masks = model, model.base, cache, masks
        kinds = getattr(model.config, "layer_types", None) or [None] * model.num_layers
        self.slides = [kind != "full_attention" for kind in kinds]
        attention, eps = self.base.layers[0].self_attn, self.base.norm.variance_epsilon
        size = attention.head_dim
        heads = [part.out_features // size for part in (attention.q_proj, attention.k_proj)]
        self.sizes = LlamaSizes(heads[0], heads[1], size, attention.scaling, eps, torch.finfo(model.dtype).min)
        self._decode, self._prefill = (
            compile_torchscript(function, model.device, enabled=model.fast_paths.torchscript)
            for function in (_decode, _prefill)
        )
        self._layer_weights: list[LayerWeights] = []
        self._rotation: tuple[Tensor, Tensor] | None = None

    def decode_step(self, token_ids_B: Tensor, positions_B: Tensor, length: int) -> Tensor:
        """Returns the logits after one more token of each row, `[B, V]`.

        Args:
            token_ids_B: The newest token of each row.
            positions_B: Its position.
            length: L.
        """
        layers, outer, (keys, values) = self._layers(), self._outer(length), self._slots()
        slides, window = self.slides, self.masks.window
        return self._decode(token_ids_B, positions_B, layers, outer, keys, values, slides, window, length, self.sizes)

    def can_prefill(self, length: int) -> bool:
        """Returns True if `prefill` computes prompts of this length."""
        return length <= MAX_PROMPT and self.masks.sees_all(length)

    def prefill(self, token_ids_BT: Tensor, last_B: Tensor, sources_n: Tensor, first: int) -> Tensor:
        """Returns the logits of each reply's first token, `[n, V]`, and fills its slot.

        Args:
            token_ids_BT: Whole prompts, padded on the right.
            last_B: Flat index b T + t of each prompt's last token.
            sources_n: Prompt of each slot from `first` on.
            first: The first slot to fill; slots have room for T tokens.
        """
        layers, outer, (keys, values) = self._layers(), self._outer(token_ids_BT.shape[1]), self._slots()
        return self._prefill(token_ids_BT, last_B, sources_n, first, layers, outer, keys, values, self.sizes)

    def drop_weights(self) -> None:
        """Drops the copies of weights, which are about to change."""
        self._layer_weights.clear()

    def _slots(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self.cache.layers
        for layer in layers:
            if not layer.is_initialized:
                empty = self.base.norm.weight.new_empty(0, self.sizes.num_kv_heads, 0, self.sizes.head_size)
                layer.lazy_initialization(empty, empty)
        return [layer.keys for layer in layers], [layer.values for layer in layers]

    def _outer(self, length: int) -> OuterWeights:
        if self._rotation is None or len(self._rotation[0]) < length:
            positions = torch.arange(2 * round_up(length), device=self.model.device)
            cos, sin = self.base.rotary_emb(self.base.norm.weight, positions[None])
            self._rotation = cos[0], sin[0]
        return OuterWeights(
            self.base.embed_tokens.weight, self.base.norm.weight, self.model.head.weight, *self._rotation
        )

    def _layers(self) -> list[LayerWeights]:
        if not self._layer_weights:
            self._layer_weights = [_collect_weights(layer) for layer in self.base.layers]
        return self._layer_weights


def supports_fast_decode(model: CausalModel) -> bool:
    """Returns True if this fast path is on, `FastLlama` computes what the model computes, and the copies are small."""
    config = model.config
    if not model.fast_paths.decode or config.model_type not in MODEL_TYPES:
        return False
    if model.dtype != torch.float32 or model.attn_implementation not in (GROUPED_ATTENTION, "sdpa"):
        return False
    if model.has_adapters or not model.has_plain_head or getattr(config, "hidden_act", None) != "silu":
        return False
    if getattr(model.base.rotary_emb, "rope_type", None) not in ROPE_TYPES:
        return False
    if type(model.base.embed_tokens) is not nn.Embedding:
        return False
    linear = [part for part in model.base.layers.modules() if isinstance(part, nn.Linear)]
    outputs = [part for layer in model.base.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    if len(linear) != 7 * model.num_layers or any(part.bias is not None for part in outputs):
        return False
    size = 4 * sum(part.weight.numel() for layer in model.base.layers for part in _find_copied(layer))
    return size <= MAX_COPIED_BYTES and all(type(part) is nn.Linear for part in linear)


def _find_copied(layer: Any) -> tuple[nn.Linear, ...]:
    """Returns the linear layers whose weights are copied."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj


@torch.no_grad()
def _collect_weights(layer: Any) -> LayerWeights:
    *qkv, gate, up = _find_copied(layer)
    attention = layer.self_attn
    return LayerWeights(
        norm=layer.input_layernorm.weight.detach(),
        qkv=torch.cat([part.weight for part in qkv]),
        qkv_bias=None if qkv[0].bias is None else torch.cat([part.bias for part in qkv]),
        query_norm=attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        out=attention.o_proj.weight.detach().t(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=torch.stack((gate.weight.t(), up.weight.t())),
        down=layer.mlp.down_proj.weight.detach().t(),
    )
